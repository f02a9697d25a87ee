// The guest's screen on its page: noVNC over the page's own socket, which also has what the relay says.
//
// The first thing that arrives is a text that says whether the viewer is connected; from then on the bytes are those of VNC.
import RFB from "@novnc/novnc";

const page = document.querySelector("[data-console]");
const screen = document.getElementById("screen");
const state = document.getElementById("console-state");
const question = document.getElementById("console-question");
const button = (name) => document.getElementById(`console-${name}`);
const texts = page.dataset;

// Why the socket was closed: the codes of the relay, and those of the server (4100 and 4101).
const ends = {
  4000: "guestEnded", 4001: "noConsole", 4002: "inUse", 4003: "refused", 4004: "takenOver", 4006: "guestEnded", 4100: "signedOut", 4101: "forbidden",
};
// After these the page connects again by itself: the guest starts again.
const again = new Set([4000, 4006]);

let rfb = null;
let socket = null;
let retry = null;

const say = (key, name) => { state.textContent = key ? texts[key].replace("NAME", name ?? "") : ""; };

// What noVNC takes for a socket. It gets only bytes.
class Channel {
  constructor(socket) {
    this.socket = socket;
    Object.assign(this, { binaryType: "arraybuffer", onopen: null, onmessage: null, onerror: null, onclose: null, protocol: "" });
  }
  get readyState() { return ["connecting", "open", "closing", "closed"][this.socket.readyState]; }
  send(data) { this.socket.send(data); }
  close() { this.socket.close(); }
}

function connect(wish) {
  clearTimeout(retry);
  rfb?.disconnect();
  socket?.close();
  const mine = new WebSocket(`${location.origin.replace(/^http/, "ws")}${texts.console}?wish=${wish}`);
  mine.binaryType = "arraybuffer";
  socket = mine;
  const channel = new Channel(mine);
  say("connecting");
  mine.onmessage = ({ data }) => {
    if (typeof data !== "string") channel.onmessage?.({ data });
    else if (mine === socket) hear(JSON.parse(data), channel, wish);
  };
  mine.onclose = ({ code, reason }) => {
    channel.onclose?.({ code, reason });
    if (mine !== socket) return;
    rfb = null;
    question.hidden = true;
    document.body.classList.remove("connected");
    say(ends[code] ?? "lost", reason);
    for (const name of ["ask", "take", "watch"]) button(name).hidden = code !== 4002;
    button("connect").hidden = code === 4002;
    if (again.has(code)) retry = setTimeout(() => connect(wish), 3000);
  };
}

function hear(news, channel, wish) {
  if (news.connected) {
    rfb = new RFB(screen, channel, { shared: true });
    rfb.viewOnly = !news.connected.controls;
    rfb.scaleViewport = true;
    rfb.addEventListener("connect", () => { document.body.classList.add("connected"); say(rfb?.viewOnly ? "watching" : null); rfb?.focus(); });
    for (const name of ["connect", "ask", "take", "watch"]) button(name).hidden = true;
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
  socket?.send(JSON.stringify({ id: Number(question.dataset.id), agrees }));
  rfb?.focus();
}

button("yes").addEventListener("click", () => answer(true));
button("no").addEventListener("click", () => answer(false));
button("connect").addEventListener("click", () => connect("control"));
button("ask").addEventListener("click", () => connect("ask"));
button("take").addEventListener("click", () => connect("takeOver"));
button("watch").addEventListener("click", () => connect("watch"));
button("keys").addEventListener("click", () => { rfb?.sendCtrlAltDel(); rfb?.focus(); });
button("full").addEventListener("click", () => (document.fullscreenElement ? document.exitFullscreen() : page.requestFullscreen()));
connect("control");
