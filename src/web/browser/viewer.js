// What the pages of the screen and of the serial console share: the socket, what the relay says, who has the console, and the wait for the guest.
//
// The first thing that arrives on the socket is a text that says whether the viewer is connected; from then on the bytes are those of the console.

const page = document.querySelector("[data-console]");
const state = document.getElementById("console-state");
const question = document.getElementById("console-question");
const texts = page.dataset;
export const screen = document.getElementById("screen");
export const button = (name) => document.getElementById(`console-${name}`);

// Why the socket was closed: the codes of the relay, and those of the server (4100 and 4101).
const ends = {
  4000: "guestEnded", 4001: "noConsole", 4002: "inUse", 4003: "refused", 4004: "takenOver", 4006: "guestEnded", 4100: "signedOut", 4101: "forbidden",
};
// After these the page connects again by itself: the guest starts again.
const guestStarts = new Set([4000, 4001]);
// And after these: the relay or the server has ended, or the connection was cut, as by a proxy.
const isCut = new Set([1001, 1005, 1006, 1011, 1012, 1013, 1014, 4006]);
// The pause before that: each one is longer, and another one in each browser, so that not all come back at once. A console that was used begins anew.
const pauses = { first: 1000, longest: 30000, long: 10000 };

let socket = null;
let retry = null;
let tries = 0;
let since = 0;
let isOpen = "open" in texts;
let wanted = "control";

export const say = (key, name) => { state.textContent = key ? texts[key].replace("NAME", name ?? "") : ""; };
export const send = (data) => { if (socket?.readyState === WebSocket.OPEN) socket.send(data); };

// A viewer has `start(socket, controls)`, which returns what takes the bytes, `end()` and `focus()`.
let viewer = null;
let take = null;

function connectLater(wish, code) {
  clearTimeout(retry);
  if (!guestStarts.has(code) && !isCut.has(code)) return;
  tries = since && performance.now() - since > pauses.long ? 0 : tries + 1;
  const pause = isCut.has(code) ? Math.min(pauses.first * 2 ** tries, pauses.longest) : 2 * pauses.first;
  // While the guest does not run, its status says when it does.
  retry = setTimeout(() => { if (isOpen) connect(wish); }, pause * (0.5 + Math.random()));
}

function connect(wish) {
  clearTimeout(retry);
  wanted = wish;
  socket?.close();
  const mine = new WebSocket(`${location.origin.replace(/^http/, "ws")}${texts.console}?wish=${wish}`);
  mine.binaryType = "arraybuffer";
  socket = mine;
  say("connecting");
  for (const name of ["connect", "ask", "take", "watch"]) if (button(name)) button(name).hidden = true;
  mine.onmessage = ({ data }) => {
    if (mine !== socket) return;
    if (typeof data === "string") hear(JSON.parse(data)); else take?.(data);
  };
  mine.onclose = ({ code, reason }) => {
    if (mine !== socket) return;
    viewer.end({ code, reason });
    take = null;
    connectLater(wish, code);
    since = 0;
    question.hidden = true;
    document.body.classList.remove("connected");
    say(ends[code] ?? "lost", reason);
    for (const name of ["ask", "take", "watch"]) if (button(name)) button(name).hidden = code !== 4002;
    // Who may not take the screen can only try again.
    button("connect").hidden = code === 4002 && button("take") !== null;
  };
}

function hear(news) {
  if (news.connected) {
    take = viewer.start(socket, news.connected.controls);
    since = performance.now();
    document.body.classList.add("connected");
    say(news.connected.controls ? null : "watching");
  } else if (news.asking) {
    say("asking", news.asking.user);
  } else if (news.question) {
    question.hidden = false;
    question.dataset.id = news.question.id;
    document.getElementById("console-asks").textContent = texts.asks.replace("NAME", news.question.user);
    button("yes").focus();
  } else if (news.withdrawn && question.dataset.id === String(news.withdrawn.id)) {
    question.hidden = true;
  }
}

function answer(agrees) {
  question.hidden = true;
  send(JSON.stringify({ id: Number(question.dataset.id), agrees }));
  viewer.focus();
}

// Begins. The console is opened as soon as the guest has one for this person.
export function view(it) {
  viewer = it;
  button("yes").addEventListener("click", () => answer(true));
  button("no").addEventListener("click", () => answer(false));
  for (const [name, wish] of [["connect", "control"], ["ask", "ask"], ["take", "takeOver"], ["watch", "watch"]]) {
    button(name)?.addEventListener("click", () => connect(wish));
  }
  button("full").addEventListener("click", () => (document.fullscreenElement ? document.exitFullscreen() : page.requestFullscreen()));
  let stream = null;
  const follow = () => {
    stream = new EventSource(texts.liveState);
    stream.addEventListener("vm", hears);
    for (const name of ["gone", "reload"]) stream.addEventListener(name, () => { stream.close(); location.reload(); });
    // A browser gives up if the answer is an error, such as a proxy's whose server starts again.
    stream.onerror = () => { if (stream.readyState === EventSource.CLOSED) setTimeout(comeBack, 2000 + Math.random() * 6000); };
  };
  const comeBack = async () => {
    const answer = await fetch(location.href, { headers: { "x-live": "1" }, redirect: "manual" }).catch(() => null);
    if (answer?.status === 200) follow();
    else if (!answer || answer.status >= 500 || answer.status === 429) setTimeout(comeBack, 2000 + Math.random() * 6000);
    // She is not let in any more, and learns why.
    else location.reload();
  };
  const hears = (event) => {
    const { html, open } = JSON.parse(event.data);
    const template = document.createElement("template");
    template.innerHTML = html;
    document.getElementById("waiting").replaceChildren(template.content);
    const opens = open && !isOpen;
    isOpen = open;
    document.body.classList.toggle("open", open);
    if (opens && !document.body.classList.contains("connected")) connect(wanted);
  };
  follow();
  window.addEventListener("pagehide", () => stream.close());
  document.body.classList.toggle("open", isOpen);
  if (isOpen) connect("control");
}
