// Loaded last, when all functions are there.
async function watchState() {
  await lookAtState();
  setTimeout(watchState, HEALTH_MS);
}
watchState();
show(TABS.some((tab) => tab.getAttribute("aria-controls") === location.hash.slice(1)) ? location.hash.slice(1) : "overview");
