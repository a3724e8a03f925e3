"use strict";
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);

// An element with properties and children; text is only ever text.
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
const number = (x, digits = 4) => x == null ? "–" : x.toFixed(digits);
const percent = share => share == null ? "–" : share >= .0995 ? `${(100 * share).toFixed(0)} %` : `${(100 * share).toPrecision(2)} %`;
// White space made visible, for a token out of its text.
const signs = {" ": "·", "\n": "⏎", "\t": "→", "\r": "␍"};
const visible = text => text.replace(/[ \n\t\r]/g, c => signs[c]) || "∅";
function bytes(text) {
  const content = atob(text), values = new Uint8Array(content.length);
  for (let i = 0; i < values.length; i++) values[i] = content.charCodeAt(i);  // Uint8Array.from takes ten times as long
  return values;
}
const ARROWS = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};  // [down, right]
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const onTheme = draw => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// A square map of shares from 0 to 1; the square root shows small ones too.
function paintMap(canvas, size, shares) {
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d"), image = context.createImageData(size, size);
  const [r, g, b] = colour("--map").split(" ");
  for (let i = 0; i < shares.length; i++) image.data.set([r, g, b, 255 * Math.sqrt(shares[i])], 4 * i);
  context.putImageData(image, 0, 0);
}

// A grid of small maps, one radio button a head: arrow keys walk through it. Returns how to mark one as chosen.
function headGrid(grid, heads, choose) {
  const most = Math.max(...heads);
  grid.setAttribute("role", "radiogroup");
  grid.style.gridTemplateColumns = `auto repeat(${most}, minmax(0, ${most > 6 ? 2.6 : 5}rem))`;
  const rows = heads.map((count, layer) => {
    grid.append(make("span", {textContent: layer, ariaHidden: true}));
    const buttons = Array.from({length: count}, (_, head) => {
      const button = make("button", {type: "button", role: "radio", tabIndex: -1, ariaChecked: "false",
        ariaLabel: `layer ${layer}, head ${head}`, title: `layer ${layer}, head ${head}`}, make("canvas"));
      button.onclick = () => choose(layer, head);
      button.onkeydown = event => {
        const [down, right] = ARROWS[event.key] ?? [];
        if (right === undefined) return;
        event.preventDefault();
        const row = rows[layer + down], to = row?.[down ? Math.min(head, row.length - 1) : head + right];
        if (to) { to.focus(); to.click(); }
      };
      grid.append(button);
      return button;
    });
    for (let rest = count; rest < most; rest++) grid.append(make("i"));
    return buttons;
  });
  const all = rows.flat();
  return {canvas: (layer, head) => rows[layer][head].firstChild, mark: (layer, head) => {
    const chosen = rows[layer]?.[head];
    for (const button of all) { button.ariaChecked = String(button === chosen); button.tabIndex = -1; }
    (chosen ?? all[0]).tabIndex = 0;
  }};
}
