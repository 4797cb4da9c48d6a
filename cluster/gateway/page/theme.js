// Sets the chosen theme before the page is drawn, so that it does not flash in another theme first.
(() => {
  const chosen = localStorage.getItem("baton.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
})();
