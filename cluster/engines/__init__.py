"""One engine group: its Serve replica, which starts and watches it; the actors of its ranks; its engines' servers."""
