// The guest's serial console on its page: xterm.js over the page's own socket.
import { Terminal } from "@xterm/xterm";
import { FitAddon } from "@xterm/addon-fit";
import { screen, send, view } from "./viewer.js";

// xterm.js makes style elements. The browser applies those with the number that only this page knows.
const nonce = document.querySelector("[data-nonce]").dataset.nonce;
const create = document.createElement.bind(document);
document.createElement = (name, options) => {
  const element = create(name, options);
  if (name === "style") element.nonce = nonce;
  return element;
};

const terminal = new Terminal({ fontFamily: "ui-monospace, monospace", fontSize: 14, scrollback: 5000, cursorBlink: false });
const fit = new FitAddon();
terminal.loadAddon(fit);
terminal.open(screen);
fit.fit();
new ResizeObserver(() => fit.fit()).observe(screen);

const encoder = new TextEncoder();
let controls = false;
terminal.onData((text) => { if (controls) send(encoder.encode(text)); });
terminal.onBinary((text) => { if (controls) send(Uint8Array.from(text, (letter) => letter.charCodeAt(0))); });

view({
  start(_, mayType) {
    controls = mayType;
    // The relay sends the last output again.
    terminal.reset();
    terminal.focus();
    return (data) => terminal.write(new Uint8Array(data));
  },
  end() { controls = false; },
  focus() { terminal.focus(); },
});
