// The guest's screen on its page: noVNC over the page's own socket.
import RFB from "@novnc/novnc";
import { initLogging } from "./node_modules/@novnc/novnc/core/util/logging.js";
import { button, say, screen, view } from "./viewer.js";

// It warns of each guest that has not made its screen as large as the window yet.
initLogging("error");

let rfb = null;
let channel = null;

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

const isOn = (name) => button(name)?.getAttribute("aria-pressed") === "true";
// A button that stays as it is, for all consoles in this browser.
function keeps(name, changed) {
  const it = button(name);
  if (!it) return;
  const set = (on) => { it.setAttribute("aria-pressed", on); localStorage.setItem(`console-${name}`, on ? "yes" : "no"); };
  const kept = localStorage.getItem(`console-${name}`);
  if (kept) set(kept === "yes");
  it.addEventListener("click", async () => { set(!isOn(name)); if (await changed() === false) set(false); rfb?.focus(); });
}

// The picture fits the window, or the guest makes its screen as large as the window: QEMU tells it, and a guest with a driver for that follows.
function scale() {
  if (!rfb) return;
  rfb.scaleViewport = isOn("scale");
  rfb.clipViewport = false;
  rfb.resizeSession = isOn("resize");
}

// The clipboard of this computer and that of the guest are one while this is on. The browser asks the person whether the page may read it.
let shared = null;

async function give() {
  if (!rfb || rfb.viewOnly || !isOn("clipboard")) return true;
  try {
    const text = await navigator.clipboard.readText();
    if (text && text !== shared) rfb?.clipboardPasteFrom(text);
    shared = text;
    return true;
  } catch {
    // The page has no focus: the next time.
    if (!document.hasFocus()) return true;
    say("clipboardRefused");
    return false;
  }
}

async function got(text) {
  if (!isOn("clipboard") || !text) return;
  shared = text;
  try { await navigator.clipboard.writeText(text); } catch { say("clipboardRefused"); }
}

view({
  start(socket, controls) {
    channel = new Channel(socket);
    rfb = new RFB(screen, channel, { shared: true });
    rfb.viewOnly = !controls;
    rfb.background = "#000";
    scale();
    rfb.addEventListener("connect", () => {
      screen.querySelector(".last")?.remove();
      rfb?.focus();
      give();
    });
    rfb.addEventListener("clipboard", ({ detail }) => got(detail.text));
    return (data) => channel.onmessage?.({ data });
  },
  // The last picture stays while the guest starts again.
  end(close) {
    const canvas = screen.querySelector("canvas:not(.last)");
    if (canvas && rfb) {
      const last = document.createElement("canvas");
      [last.width, last.height, last.className] = [canvas.width, canvas.height, "last"];
      if (canvas.width && canvas.height) last.getContext("2d").drawImage(canvas, 0, 0);
      screen.querySelector(".last")?.remove();
      screen.append(last);
    }
    channel?.onclose?.(close);
    [rfb, channel] = [null, null];
    release();
  },
  focus() { rfb?.focus(); },
});

// Keys that are held until the next one, for those that a browser or a phone does not have: X11's names of them, and their places on a keyboard.
const keys = { Ctrl: [0xffe3, "ControlLeft"], Alt: [0xffe9, "AltLeft"], Super: [0xffeb, "MetaLeft"] };
const sticky = [...document.querySelectorAll(".sticky")];

function hold(it, isHeld) {
  if (it.getAttribute("aria-pressed") === String(isHeld)) return;
  it.setAttribute("aria-pressed", isHeld);
  rfb?.sendKey(...keys[it.dataset.key], isHeld);
}

function release() { sticky.forEach((it) => hold(it, false)); }

for (const it of sticky) it.addEventListener("click", () => { hold(it, it.getAttribute("aria-pressed") !== "true"); rfb?.focus(); });
// The key that they were held for has been let go.
screen.addEventListener("keyup", (event) => { if (!["Control", "Alt", "Meta", "Shift"].includes(event.key)) release(); }, true);

button("keys").addEventListener("click", () => { release(); rfb?.sendCtrlAltDel(); rfb?.focus(); });
keeps("scale", scale);
keeps("resize", scale);
keeps("clipboard", () => { shared = null; say(null); return give(); });
// Somebody comes back from another window, where she may have copied something.
window.addEventListener("focus", give);

// A text is typed key by key: that works in every guest, also before anybody has signed in there.
const dialog = document.getElementById("paste");
const keysym = (letter) => {
  const code = letter.codePointAt(0);
  if (letter === "\n") return 0xff0d;
  if (letter === "\t") return 0xff09;
  return code < 0x100 ? code : 0x01000000 | code;
};

async function type(text) {
  for (const letter of text.replaceAll("\r", "")) {
    if (!rfb) return;
    rfb.sendKey(keysym(letter), null);
    // Guests lose keys that come too fast.
    await new Promise((done) => { setTimeout(done, 8); });
  }
}

button("paste").addEventListener("click", () => { dialog.returnValue = ""; dialog.showModal(); });
dialog.addEventListener("close", () => {
  const field = document.getElementById("paste-text");
  if (dialog.returnValue === "yes") type(field.value);
  field.value = "";
  rfb?.focus();
});
