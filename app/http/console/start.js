// Loaded last, when all functions are there.
setInterval(lookAtState, HEALTH_MS);
lookAtState();
show(TABS.some((tab) => tab.getAttribute("aria-controls") === location.hash.slice(1)) ? location.hash.slice(1) : "overview");
