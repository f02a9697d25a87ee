// The form for a new VM: asks the server what it makes of the fields while somebody types, and shows that beside them. The server makes the YAML, so
// that there is no second place that knows it.
"use strict";

(() => {
  const form = document.getElementById("create");
  let [asking, waiting] = [null, null];

  async function check() {
    asking?.abort();
    asking = new AbortController();
    const body = new URLSearchParams(new FormData(form));
    body.set("do", "check");
    body.set("live", "1");
    const answer = await fetch(form.getAttribute("action"), { method: "POST", body, signal: asking.signal }).catch(() => null);
    if (answer?.status === 401) location.reload();
    if (!answer?.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const old of document.querySelectorAll("[data-answer]")) {
      const fresh = page.getElementById(old.id);
      if (fresh && fresh.innerHTML !== old.innerHTML) old.replaceChildren(...fresh.childNodes);
    }
    for (const field of form.querySelectorAll("input[id], select, textarea")) {
      if (page.getElementById(field.id)?.hasAttribute("aria-invalid")) field.setAttribute("aria-invalid", "true");
      else field.removeAttribute("aria-invalid");
    }
  }

  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(check, 300);
  });
  form.addEventListener("submit", () => {
    clearTimeout(waiting);
    asking?.abort();
  });
})();
