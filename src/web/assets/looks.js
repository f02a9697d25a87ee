// What one looks at: small pictures of screens, and lines of what a guest uses. A page without it shows everything else.
"use strict";

// How long a picture is shown, and how many points a line has.
const [OLD, POINTS] = [10000, 300];
const screens = document.getElementById("screens");
const pictures = new Map();

// Shows what is known, also in a part of the page that has just been replaced. Nothing is hidden that the reader's focus is on.
function show(image) {
  const known = pictures.get(image.dataset.picture);
  if (known?.url && image.getAttribute("src") !== known.url) image.src = known.url;
  image.parentElement.hidden = !known?.url;
}

// The list has pictures only if the reader wants them: a row is high with one.
function arrangePictures() {
  for (const row of screens ? document.querySelectorAll("#rows [data-vm]") : []) {
    const [link, picture] = [row.querySelector("a[href$='/console']"), row.querySelector(".picture")];
    if (!screens.checked || !link) { picture?.remove(); continue; }
    if (picture) continue;
    const [anchor, image] = [document.createElement("a"), document.createElement("img")];
    Object.assign(anchor, { className: "picture", href: link.href, tabIndex: -1, hidden: true });
    anchor.setAttribute("aria-hidden", "true");
    image.alt = "";
    image.dataset.picture = `/live/vm/${row.dataset.vm}/picture`;
    anchor.append(image);
    row.querySelector("th").prepend(anchor);
  }
  document.querySelectorAll("img[data-picture]").forEach(show);
}

function isSeen(image) {
  // A picture that is not shown yet has no place of its own.
  const box = image.closest("[data-vm], section").getBoundingClientRect();
  return box.bottom > 0 && box.top < innerHeight && !image.closest("tr")?.hidden;
}

// One picture after the other, so that a page with many does not keep the server from answering something else.
async function look() {
  while (!document.hidden) {
    const due = [...document.querySelectorAll("img[data-picture]")].find((image) => isSeen(image) && !(Date.now() - pictures.get(image.dataset.picture)?.at < OLD));
    if (!due) break;
    const [path, known] = [due.dataset.picture, pictures.get(due.dataset.picture)];
    const answer = await fetch(path).catch(() => null);
    const url = answer?.status === 200 ? URL.createObjectURL(await answer.blob()) : null;
    pictures.set(path, { url, at: Date.now() });
    document.querySelectorAll(`img[data-picture="${CSS.escape(path)}"]`).forEach(show);
    if (known?.url) URL.revokeObjectURL(known.url);
  }
  setTimeout(look, 1000);
}

let waits = false;
new MutationObserver(() => {
  if (waits) return;
  waits = true;
  queueMicrotask(() => { waits = false; arrangePictures(); });
}).observe(document.getElementById("main"), { childList: true, subtree: true });
if (screens) {
  screens.checked = localStorage.getItem("screens") === "yes";
  screens.addEventListener("change", () => { localStorage.setItem("screens", screens.checked ? "yes" : ""); arrangePictures(); });
}
arrangePictures();
look();

// The figures of one guest, as its page's stream brings them.
const figures = document.getElementById("figures");
const past = [];
const language = document.documentElement.lang;
const bytes = (count, unit = "") => {
  const step = count < 1 ? 0 : Math.min(Math.floor(Math.log2(count) / 10), 5);
  const number = new Intl.NumberFormat(language, { maximumFractionDigits: step > 2 ? 1 : 0 }).format(count / 1024 ** step);
  return `${number} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][step]}${unit}`;
};
const percent = (part) => new Intl.NumberFormat(language, { style: "percent", maximumFractionDigits: 0 }).format(part);
// The words of a chart, its one or two lines, and what is at its top.
const charts = {
  cpus: (it) => [percent(it.cpus / it.ofCpus), [it.cpus], it.ofCpus],
  ram: (it) => (it.ramUsed === null || !it.ram ? ["", [], 1] : [`${bytes(it.ramUsed)} / ${bytes(it.ram)}`, [it.ramUsed], it.ram]),
  disk: (it) => [`↑ ${bytes(it.diskWritten, "/s")} ↓ ${bytes(it.diskRead, "/s")}`, [it.diskWritten, it.diskRead], 0],
  network: (it) => [`↑ ${bytes(it.networkSent, "/s")} ↓ ${bytes(it.networkReceived, "/s")}`, [it.networkSent, it.networkReceived], 0],
};

function draw() {
  for (const chart of figures.querySelectorAll("[data-figure]")) {
    const points = past.map(charts[chart.dataset.figure]);
    const [words, lines, top] = points.at(-1);
    chart.hidden = lines.length === 0;
    chart.querySelector(".value").textContent = words;
    const most = top || Math.max(1024, ...points.flatMap(([, values]) => values));
    chart.querySelectorAll("polyline").forEach((line, at) => {
      const place = ([, values], x) => `${240 - (points.length - 1 - x) * (240 / (POINTS - 1))},${40 - (38 * Math.min(values[at] ?? 0, most)) / most}`;
      line.setAttribute("points", at < lines.length ? points.map(place).join(" ") : "");
    });
  }
  figures.hidden = false;
}

document.addEventListener("figures", (event) => {
  if (!figures) return;
  past.push(event.detail);
  if (past.length > POINTS) past.shift();
  draw();
});
