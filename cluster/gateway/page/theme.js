// Sets the theme that was chosen before the page is drawn, so that it does not flash in another one.
(() => {
  const chosen = localStorage.getItem("baton.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
})();
