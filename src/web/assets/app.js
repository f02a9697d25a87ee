// Keeps the VMs on a page as they are in the cluster, and makes the list quick to use. Without this script each page works as well, and shows what
// was when it was loaded.
"use strict";

const byId = (id) => document.getElementById(id);
const toast = byId("toast");

// What a page says without being left. It is read out.
function say(text) {
  toast.replaceChildren();
  if (!text) return;
  const [words, close] = [document.createElement("p"), document.createElement("button")];
  words.textContent = text;
  close.textContent = toast.dataset.close;
  close.addEventListener("click", () => say(""));
  toast.append(words, close);
}

// What a person is asked before an action that hurts. The answer is a promise.
function ask(question, yes) {
  const dialog = byId("ask");
  byId("ask-text").textContent = question;
  const button = dialog.querySelector("[value=yes]");
  button.textContent = yes;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((answer) => dialog.addEventListener("close", () => answer(dialog.returnValue === "yes"), { once: true }));
}

// Sends a form without leaving the page: what it changes arrives by the stream.
async function send(form, button) {
  // Before the button is disabled: its value would be missing.
  const body = new URLSearchParams(new FormData(form, button));
  button.disabled = true;
  const action = button.getAttribute("formaction") ?? form.getAttribute("action");
  const answer = await fetch(action, { method: "POST", body, redirect: "manual" }).catch(() => null);
  if (answer?.type === "opaqueredirect") {
    say(button.dataset.done ?? "");
    if (form.id === "bulk") form.reset();
  } else if (answer?.status === 401) {
    location.reload();
  } else {
    const page = answer && new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main [data-says]");
    if (page) times(page);
    say(page?.innerText.trim() || toast.dataset.failed);
  }
}

document.addEventListener("submit", async (event) => {
  const [form, button] = [event.target, event.submitter];
  if (form.method === "dialog") return;
  if (!button || form.dataset.agreed) { delete form.dataset.agreed; return; }
  const [question, stays] = [button.dataset.confirm, "stay" in form.dataset];
  if (question || stays) event.preventDefault();
  if (question && !await ask(question.replace("COUNT", picked().length), button.dataset.yes ?? button.textContent)) return;
  if (stays) {
    await send(form, button);
    button.disabled = false;
  } else if (question) {
    form.dataset.agreed = "1";
    form.requestSubmit(button);
  } else {
    // Not twice, unless the answer is a file and the page stays. The form is sent before the button is disabled.
    setTimeout(() => { button.disabled = !("again" in button.dataset); });
  }
});

// Times in the reader's own zone and way of writing.
function times(root) {
  const [language, now] = [document.documentElement.lang, Date.now()];
  const format = new Intl.DateTimeFormat(language, { dateStyle: "medium", timeStyle: "short" });
  const relative = new Intl.RelativeTimeFormat(language, { numeric: "auto" });
  for (const it of root.querySelectorAll("time[datetime]")) {
    const at = new Date(it.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    const minutes = Math.round((at - now) / 60000);
    const left = Math.abs(minutes) < 120 ? relative.format(minutes, "minute") : Math.abs(minutes) < 2880 ? relative.format(Math.round(minutes / 60), "hour") : relative.format(Math.round(minutes / 1440), "day");
    it.title = format.format(at);
    it.textContent = "left" in it.dataset ? left : it.title;
  }
}

// Copies what an element says. Buttons for that are hidden where there is no clipboard.
for (const button of document.querySelectorAll("[data-copy]")) button.hidden = !navigator.clipboard;
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const text = button.textContent;
  await navigator.clipboard.writeText(byId(button.dataset.copy).textContent);
  button.textContent = button.dataset.done;
  setTimeout(() => { button.textContent = text; }, 2000);
});

const live = document.querySelector("[data-live]");
const state = byId("live-state");
const rows = byId("rows");
const lists = [rows, byId("pools")].filter(Boolean);
// The rows by the VMs that they show.
const known = new Map(lists.flatMap((list) => [...list.querySelectorAll("[data-vm]")]).map((row) => [row.dataset.vm, row]));

// The elements that the server has rendered. A template element runs no script and loads nothing.
function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  times(template.content);
  return template.content.firstElementChild;
}

// Puts the new element in the place of the old one. Whoever is on a button stays there, and what was typed or chosen stays.
function swap(old, fresh) {
  const at = old.contains(document.activeElement) ? document.activeElement : null;
  for (const field of old.querySelectorAll("input")) {
    const same = field.id ? fresh.querySelector(`#${CSS.escape(field.id)}`) : [...fresh.querySelectorAll("input")].find((it) => it.name === field.name && it.type === field.type);
    if (!same) continue;
    if (field.type === "checkbox") same.checked = field.checked;
    else if (field.value !== field.defaultValue) same.value = field.value;
  }
  const [name, id, link] = [at?.getAttribute("aria-label"), at?.id, at?.getAttribute("href")];
  old.replaceWith(fresh);
  if (at) [...fresh.querySelectorAll("a, button, input")].find((it) => (id && it.id === id) || (name ? it.getAttribute("aria-label") === name : link && it.getAttribute("href") === link))?.focus();
}

// In the order of the server: by bytes, the namespace first.
function isBehind(a, b) {
  const [[c, d], [e, f]] = [a.dataset.vm.split("/"), b.dataset.vm.split("/")];
  return c > e || (c === e && d > f);
}

function put({ id, html }) {
  const [fresh, old] = [parsed(html), known.get(id)];
  known.set(id, fresh);
  if (old) {
    fresh.hidden = old.hidden;
    swap(old, fresh);
  } else {
    const list = id.startsWith("pool:") ? byId("pools") : rows;
    list.insertBefore(fresh, [...list.querySelectorAll("[data-vm]")].find((row) => isBehind(row, fresh)) ?? null);
  }
  arrangeSoon();
}

function remove(id) {
  known.get(id)?.remove();
  known.delete(id);
  arrangeSoon();
}

// A page that shows one VM is fetched again as a whole: at once, but at most twice a second. What changes while an answer is on its way is in the next one.
let [pending, asked, shown] = [null, -Infinity, -Infinity];
function refresh() {
  pending ??= setTimeout(async () => {
    const mine = performance.now();
    [pending, asked] = [null, mine];
    const answer = await fetch(location.href, { headers: { "x-live": "1" } }).catch(() => null);
    if (!answer || answer.status !== 200 || answer.redirected) { location.reload(); return; }
    const text = await answer.text().catch(() => null);
    const page = text && new DOMParser().parseFromString(text, "text/html").getElementById("whole");
    // A later one was faster.
    if (!page || mine < shown) return;
    shown = mine;
    times(page);
    swap(byId("whole"), page);
  }, Math.max(0, asked + 500 - performance.now()));
}

// The list: filter, groups, counts, and the selection.
const filter = byId("filter");
const group = byId("group");
const visible = () => [...rows.querySelectorAll("[data-vm]:not([hidden])")];
const picked = () => (rows ? [...rows.querySelectorAll(".pick input:checked")] : []);
const own = (row, key) => (row.dataset[key] ?? "").toLowerCase().split(" ").filter(Boolean);

// Whether a row fits: all words do. `state:failed,starting` is one of these; a value that no row has may be the beginning of one.
function test(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [, key, list] = /^(state|node|namespace|pool|user):(.*)$/.exec(word) ?? [];
    if (!key) return (row) => row.textContent.toLowerCase().includes(word);
    const wanted = list.split(",").filter(Boolean);
    const all = new Set([...known.values()].flatMap((row) => own(row, key)));
    const fits = (value) => wanted.some((it) => (all.has(it) ? value === it : value.startsWith(it)));
    return (row) => wanted.length === 0 || own(row, key).some(fits);
  });
  return (row) => words.every((fits) => fits(row));
}

function heading(name, count) {
  const [row, cell, number] = [document.createElement("tr"), document.createElement("th"), document.createElement("span")];
  row.className = "group";
  cell.colSpan = 9;
  cell.scope = "rowgroup";
  number.className = "quiet";
  number.textContent = count;
  cell.append(name || rows.dataset.nothing, " ", number);
  row.append(cell);
  return row;
}

function arrange() {
  if (!filter) return;
  const [fits, counts, focus] = [test(filter.value), new Map(), document.activeElement];
  for (const row of known.values()) {
    row.hidden = !fits(row);
    // Nothing is selected that is not seen.
    if (row.hidden) row.querySelector(".pick input").checked = false;
    counts.set(row.dataset.state, (counts.get(row.dataset.state) ?? 0) + 1);
  }
  for (const chip of byId("states").children) {
    const count = counts.get(chip.dataset.state) ?? 0;
    chip.hidden = count === 0;
    chip.querySelector(".count").textContent = count;
    chip.setAttribute("aria-pressed", new RegExp(`(^|\\s)state:${chip.dataset.state}(\\s|$)`, "i").test(filter.value));
  }
  const by = group.value;
  const name = (row) => (by === "state" ? row.querySelector(".state").textContent : row.dataset[by]);
  rows.querySelectorAll(".group").forEach((it) => it.remove());
  const sorted = [...known.values()].sort((a, b) => (by && name(a) !== name(b) ? (name(a) < name(b) ? -1 : 1) : isBehind(a, b) ? 1 : -1));
  if (sorted.some((row, at) => rows.children[at] !== row)) {
    rows.append(...sorted);
    focus?.focus({ preventScroll: true });
  }
  if (by) {
    for (const [key, members] of Map.groupBy(visible(), name)) rows.insertBefore(heading(key, members.length), members[0]);
  }
  byId("none").hidden = known.size === 0 || visible().length > 0;
  count();
  const query = new URLSearchParams([["q", filter.value.trim()], ["group", by]].filter(([, value]) => value));
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

let arranging = false;
function arrangeSoon() {
  if (arranging || !filter) return;
  arranging = true;
  requestAnimationFrame(() => { arranging = false; arrange(); });
}

function count() {
  const selected = byId("selected");
  selected.textContent = selected.dataset.text.replace("COUNT", picked().length);
  const [all, seen] = [byId("all"), visible().length];
  all.checked = seen > 0 && picked().length === seen;
  all.indeterminate = picked().length > 0 && picked().length < seen;
}

if (filter) {
  const query = new URLSearchParams(location.search);
  filter.value = query.get("q") ?? "";
  group.value = query.get("group") ?? "";
  filter.addEventListener("input", arrangeSoon);
  group.addEventListener("change", arrangeSoon);
  byId("clear").addEventListener("click", () => { filter.value = ""; arrange(); filter.focus(); });
  byId("states").addEventListener("click", (event) => {
    const chip = event.target.closest("button");
    if (!chip) return;
    const rest = filter.value.replace(/(^|\s)state:\S*/gi, "").trim();
    filter.value = chip.getAttribute("aria-pressed") === "true" ? rest : `${rest} state:${chip.dataset.state.toLowerCase()}`.trim();
    arrange();
  });
  byId("all").addEventListener("change", (event) => {
    for (const row of visible()) row.querySelector(".pick input").checked = event.target.checked;
    count();
  });
  let last = null;
  rows.addEventListener("click", (event) => {
    const box = event.target.closest(".pick input");
    if (box) {
      const seen = visible();
      const [from, to] = [seen.findIndex((row) => row.dataset.vm === last), seen.indexOf(box.closest("tr"))].sort((a, b) => a - b);
      if (event.shiftKey && from >= 0) for (const row of seen.slice(from, to + 1)) row.querySelector(".pick input").checked = box.checked;
      last = box.value;
      count();
    }
    const more = event.target.closest(".more");
    if (more) menu(more);
  });
  byId("bulk").addEventListener("reset", () => setTimeout(count));
  arrange();
}

// The actions of one VM beside the first one.
function menu(more) {
  const [box, vm, actions] = [byId("menu"), more.closest("[data-vm]").dataset.vm, more.dataset.more.split(" ")];
  for (const button of box.children) {
    button.hidden = !actions.includes(button.value);
    button.setAttribute("formaction", `/vms/${vm}/${button.value}`);
    button.setAttribute("aria-label", `${button.textContent}: ${more.dataset.name}`);
    if (button.dataset.question) button.dataset.confirm = button.dataset.question.replace("NAME", more.dataset.name);
  }
  box.showPopover({ source: more });
  box.querySelector("button:not([hidden])")?.focus();
}
byId("menu")?.addEventListener("click", () => byId("menu").hidePopover());
byId("menu")?.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const buttons = [...byId("menu").querySelectorAll("button:not([hidden])")];
  buttons.at((buttons.indexOf(document.activeElement) + step) % buttons.length)?.focus();
  event.preventDefault();
});

// Keys of the list: `/` filters; in the list `j` and `k` go down and up, and `x` selects.
document.addEventListener("keydown", (event) => {
  if (!filter || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const target = event.target;
  if (target === filter) {
    if (event.key === "Enter") visible()[0]?.querySelector("th a").focus();
    return;
  }
  if (target.matches("input:not([type=checkbox]), select, textarea")) return;
  const [seen, at] = [visible(), target.closest("#rows [data-vm]")];
  const step = { j: 1, k: -1 }[event.key];
  if (event.key === "/") filter.focus();
  else if (step) seen[at ? Math.min(Math.max(seen.indexOf(at) + step, 0), seen.length - 1) : 0]?.querySelector("th a").focus();
  else if (event.key === "x" && at) at.querySelector(".pick input").click();
  else return;
  event.preventDefault();
});

times(document);
setInterval(() => times(document), 30000);

if (live) {
  const address = new URL(live.dataset.live, location.href);
  let stream = null;
  const events = {
    vms: (ids) => { for (const id of [...known.keys()]) if (!ids.includes(id)) remove(id); },
    vm: (vm) => { if (rows) put(vm); else refresh(); },
    gone: (id) => { if (rows) remove(id); else location.reload(); },
    figures: (detail) => document.dispatchEvent(new CustomEvent("figures", { detail })),
    // Rights have changed, or the session has ended.
    reload: () => { stream.close(); location.reload(); },
  };
  const open = () => {
    stream = new EventSource(address);
    stream.onopen = () => { state.textContent = ""; };
    stream.onerror = () => {
      state.textContent = state.dataset.lost;
      // The browser gives up if the answer is an error.
      if (stream.readyState === EventSource.CLOSED) setTimeout(comeBack, 2000 + Math.random() * 6000);
    };
    for (const [name, act] of Object.entries(events)) {
      stream.addEventListener(name, (event) => {
        if (event.lastEventId) address.searchParams.set("since", event.lastEventId);
        act(event.data && JSON.parse(event.data));
      });
    }
  };
  // The server does not let the page in any more, which is said by the page itself; or it can't be reached, and a proxy says so: then the page stays, and
  // tries again. Not all pages at once.
  const comeBack = async () => {
    if (document.hidden || stream.readyState !== EventSource.CLOSED) return;
    const answer = await fetch(location.href, { headers: { "x-live": "1" }, redirect: "manual" }).catch(() => null);
    if (!answer || answer.status >= 500 || answer.status === 429) setTimeout(comeBack, 2000 + Math.random() * 6000);
    else location.reload();
  };
  // A browser has six connections to a server without HTTP/2, and each stream takes one. So a tab that nobody sees has none, and goes on where it was.
  const follow = () => {
    if (document.hidden) stream?.close();
    else if (!stream || stream.readyState === EventSource.CLOSED) open();
  };
  follow();
  document.addEventListener("visibilitychange", follow);
  window.addEventListener("pagehide", () => stream?.close());
  window.addEventListener("pageshow", (event) => { if (event.persisted) follow(); });
}
