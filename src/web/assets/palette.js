// Ctrl-K: finds VMs, what may be done with them, and pages. The server makes the entries; arrows go through them, and what is typed goes to the field.
"use strict";

(() => {
  const [palette, opener] = [document.getElementById("palette"), document.getElementById("palette-open")];
  if (!palette || !opener) return;
  const [field, found] = [palette.querySelector("input"), document.getElementById("found")];
  const entries = () => [...found.querySelectorAll("a, button")];
  let asking = null;

  async function look() {
    asking?.abort();
    asking = new AbortController();
    const answer = await fetch(`/palette?q=${encodeURIComponent(field.value)}`, { signal: asking.signal }).catch(() => null);
    if (answer?.status === 401) location.reload();
    if (!answer?.ok) return;
    const html = await answer.text().catch(() => null);
    if (html === null) return;
    const template = document.createElement("template");
    template.innerHTML = html;
    found.replaceChildren(template.content);
  }

  function open() {
    if (document.querySelector("dialog[open]")) return;
    palette.showModal();
    field.select();
    look();
  }

  opener.hidden = false;
  opener.addEventListener("click", open);
  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey || event.key.toLowerCase() !== "k") return;
    event.preventDefault();
    open();
  });
  field.addEventListener("input", look);
  palette.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      const [all, at] = [[field, ...entries()], document.activeElement];
      all.at((all.indexOf(at) + step) % all.length)?.focus();
      event.preventDefault();
    } else if (event.key === "Enter" && event.target === field) {
      entries()[0]?.click();
      event.preventDefault();
    } else if (event.key.length === 1 && event.key !== " " && event.target !== field && !event.ctrlKey && !event.metaKey) {
      field.focus();
    }
  });
  // Before the form is sent: it may ask first.
  found.addEventListener("click", (event) => { if (event.target.closest("button")) palette.close(); });
})();
