// API keys: list, create, rotate, revoke. A secret is in the page only until its dialog is closed.

async function lookAtKeys() {
  const { keys } = await ask("v1/keys");
  fill("key-rows", keys.map(keyRow), "No key yet but the admin key. Create one for each program, with the fewest scopes.", 5);
}

function keyRow({ name, scopes, bound_to: boundTo, created_ms: created, expires_ms: expires, rotated_ms: rotated,
  former_until_ms: formerUntil }) {
  const isExpired = expires !== null && expires <= Date.now();
  const isBoth = formerUntil !== null && formerUntil > Date.now();
  const times = [
    made("div", {}, `created ${shortly(created)}`),
    expires === null ? null : made("div", isExpired ? { class: "bad" } : {}, `${isExpired ? "expired" : "expires"} ${shortly(expires)}`),
    rotated === null ? null : made("div", {}, `rotated ${shortly(rotated)}`),
    isBoth ? made("div", { class: "hint" }, `the key before is valid until ${shortly(formerUntil)}`) : null,
  ];
  const row = made("tr", { "data-key": name }, ...cells(made("code", {}, name), scopes.join(", "),
    made("div", {}, ...(boundTo.length ? boundTo.map((entity) => made("div", {}, made("code", {}, entity))) : ["any entity"])),
    made("div", {}, ...times.filter(Boolean))));
  row.append(made("td", { class: "actions" },
    made("button", { type: "button", disabled: isExpired ? "" : null, onclick: () => offerRotation(name) }, "Rotate…"), " ",
    made("button", { type: "button", onclick: () => revoke(name) }, "Revoke…")));
  return row;
}

byId("key-new").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  const body = { name: byId("key-name").value.trim(), scopes: new FormData(form).getAll("scope") };
  const boundTo = byId("key-bound").value.split("\n").map((line) => line.trim()).filter(Boolean);
  if (boundTo.length) body.bound_to = boundTo;
  const expires = byId("key-expires").value;
  if (expires) body.expires_ms = new Date(expires).getTime();
  act(async () => {
    const { name, key: secret } = await ask("v1/keys", { method: "POST", body });
    form.reset();
    showSecret(`The key ${name}`, secret);
    await lookAtKeys();
  }, event.submitter);
});

let rotating = "";

function offerRotation(name) {
  rotating = name;
  byId("rotation-title").textContent = `Rotate the key ${name}`;
  byId("rotation").showModal();
  byId("rotation-grace").focus();
}

byId("rotation-no").addEventListener("click", () => byId("rotation").close());
byId("rotation-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("rotation").close();
  act(async () => {
    const body = { grace_ms: Number(byId("rotation-grace").value) };
    const { name, key: secret } = await ask(`v1/keys/${encodeURIComponent(rotating)}:rotate`, { method: "POST", body });
    showSecret(`The new key ${name}`, secret);
    await lookAtKeys();
  }, event.submitter);
});

function revoke(name) {
  if (!confirm(`Revoke the key ${name}? Its callers are refused within a second, and it cannot be brought back.`)) return;
  act(async () => { await ask(`v1/keys/${encodeURIComponent(name)}`, { method: "DELETE" }); await lookAtKeys(); });
}

async function showSecret(title, secret) {
  while (byId("secret").open) await new Promise((closed) => { byId("secret").addEventListener("close", closed, { once: true }); });
  byId("secret-title").textContent = title;
  byId("secret-text").value = secret;
  byId("secret-copied").textContent = "";
  byId("secret").showModal();
  byId("secret-text").select();
}

byId("secret-copy").addEventListener("click", async () => {
  byId("secret-text").select();
  try {
    await navigator.clipboard.writeText(byId("secret-text").value); // without TLS browsers allow it on this machine alone
    byId("secret-copied").textContent = "copied";
  } catch {
    byId("secret-copied").textContent = "press Ctrl-C: it is selected";
  }
});
byId("secret-close").addEventListener("click", () => byId("secret").close());
byId("secret").addEventListener("close", () => { byId("secret-text").value = ""; });
// Esc would discard the only copy. A browser lets a second one through unless the key itself is stopped.
byId("secret").addEventListener("cancel", (event) => event.preventDefault());
byId("secret").addEventListener("keydown", (event) => { if (event.key === "Escape") event.preventDefault(); });
