// Keeps the VMs on a page as they are in the cluster. Without this script each page works as well, and shows what was when it was loaded.
"use strict";

// What a person is asked before an action that hurts.
document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.confirm;
  if (question && !window.confirm(question)) {
    event.preventDefault();
    return;
  }
  // Not twice, unless the answer is a file and the page stays. The form is sent before the button is disabled.
  setTimeout(() => { if (event.submitter && !("again" in event.submitter.dataset)) event.submitter.disabled = true; });
});

const live = document.querySelector("[data-live]");
const state = document.getElementById("live-state");

// The elements that the server has rendered. A template element runs no script and loads nothing.
function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content.firstElementChild;
}

const shown = (rows, id) => [...rows.children].find((row) => row.dataset.vm === id);

// Puts the new element in the place of the old one. Whoever is on a button stays there.
function swap(old, fresh) {
  const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  old.replaceWith(fresh);
  if (focused) [...fresh.querySelectorAll("[aria-label]")].find((it) => it.getAttribute("aria-label") === focused)?.focus();
}

function put(rows, { id, html }) {
  const fresh = parsed(html);
  const old = shown(rows, id);
  if (old) {
    swap(old, fresh);
    return;
  }
  // In the order of the server: by bytes, the namespace first.
  const key = (row) => row.dataset.vm.split("/");
  const isBehind = (row) => { const [a, b] = key(row), [c, d] = key(fresh); return a > c || (a === c && b > d); };
  rows.insertBefore(fresh, [...rows.children].find(isBehind) ?? null);
}

// A page that shows one VM is fetched again as a whole, at most twice a second.
let pending = null;
function refresh() {
  pending ??= setTimeout(async () => {
    const answer = await fetch(location.href, { headers: { "x-live": "1" } }).catch(() => null);
    pending = null;
    if (!answer || answer.status !== 200 || answer.redirected) { location.reload(); return; }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("whole");
    if (page) swap(document.getElementById("whole"), page);
  }, 500);
}

if (live) {
  const rows = document.getElementById("rows");
  const stream = new EventSource(live.dataset.live);
  stream.onopen = () => { state.textContent = ""; };
  stream.onerror = () => {
    state.textContent = state.dataset.lost;
    // The server does not let the page in any more, so that the browser does not try again.
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => location.reload(), 3000);
  };
  stream.addEventListener("vms", (event) => {
    const ids = new Set(JSON.parse(event.data));
    if (rows) for (const row of [...rows.children]) if (!ids.has(row.dataset.vm)) row.remove();
  });
  stream.addEventListener("vm", (event) => { if (rows) put(rows, JSON.parse(event.data)); else refresh(); });
  stream.addEventListener("gone", (event) => { if (rows) shown(rows, JSON.parse(event.data))?.remove(); else location.reload(); });
  // Rights have changed, or the session has ended.
  stream.addEventListener("reload", () => { stream.close(); location.reload(); });
  window.addEventListener("pagehide", () => stream.close());
}
