"use strict";
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);

// An HTML element with properties and children; text never becomes markup.
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// An SVG element with attributes and children.
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const FONT = "system-ui, Helvetica, Arial, sans-serif";
const MIDDLE = {"text-anchor": "middle"};
const END = {"text-anchor": "end"};

function drawing(width, height, ...children) {
  const size = {viewBox: `0 0 ${width} ${height}`, width, height};
  const paper = draw("rect", {width, height, fill: "var(--paper)"});
  return draw("svg", {...size, "font-family": FONT, "font-size": 12, fill: "var(--ink)"}, paper, ...children);
}

// SVG text, in the direction of its first letter. XML has no control characters.
const write = (text, x, y, more = {}) =>
  draw("text", {x, y, style: "unicode-bidi: plaintext", ...more}, `${text}`.replace(/[\0-\x1f]/g, "�"));
const pen = make("canvas").getContext("2d");
pen.font = `12px ${FONT}`;
const widthOf = text => pen.measureText(text).width;
const cut = (text, most) => (text.length > most ? `${text.slice(0, most / 2)}…${text.slice(1 - most / 2)}` : text);

const number = (x, digits = 4) => (isFinite(x ?? NaN) ? x.toFixed(digits) : "–");
const grouped = x => Math.round(x).toLocaleString("en");
const percent = share => {
  if (share >= 0.995 && share < 1) return "> 99 %";
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${share >= 0.0995 ? (100 * share).toFixed(0) : (100 * share).toPrecision(2)} %`;
};

// Visible white space, for a token that is shown by itself.
const signs = {" ": "·", "\n": "⏎", "\t": "→", "\r": "␍"};
const visible = text => text.replace(/[ \n\t\r]/g, sign => signs[sign]) || "∅";

function bytes(text) {
  const content = atob(text);
  const values = new Uint8Array(content.length);
  // Uint8Array.from would take ten times as long.
  for (let i = 0; i < values.length; i++) values[i] = content.charCodeAt(i);
  return values;
}

// A figure: title, buttons to save it, drawing, and a line that reads out a place. of(width) returns its parts,
// {svg, places, table}. The pointer and the arrow keys move between places: {row, i: index in the row, x, y, text: to read out, key}. table()
// returns the rows of the CSV file, the names first. point(key) is called when the key under the pointer changes,
// choose(key) at a click or Enter.
const figures = {};
const SAVED = 720;  // width of a saved drawing
const MOVES = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  Home: [0, -1e9],
  End: [0, 1e9],
};

function figure(parent, id, title, of, {point = () => {}, choose = () => {}} = {}) {
  let shown;
  let now;
  let ring;
  const heading = make("b", {textContent: title, dir: "auto"});
  const ariaLabel = `${title}; arrow keys read it`;
  const plot = make("div", {className: "plot", tabIndex: 0, role: "img", ariaLabel});
  const reading = make("p", {className: "reading", role: "status", dir: "auto"});
  // Read out the current place and draw a ring around it.
  function mark() {
    ring?.remove();
    now = now && shown.places.find(place => place.row === now.row && place.i === now.i);
    reading.textContent = now?.text ?? "";
    ring = now && draw("circle", {cx: now.x, cy: now.y, r: 6, fill: "none", stroke: "var(--ink)", "stroke-width": 2});
    if (ring) plot.firstChild.append(ring);
  }
  function go(to) {
    const before = now?.key;
    now = to;
    mark();
    if (now?.key !== before) point(now?.key);
  }
  plot.onpointermove = event => {
    const {left, top, width} = plot.firstChild.getBoundingClientRect();
    const scale = width / plot.firstChild.viewBox.baseVal.width;
    const far = ({x, y}) => Math.hypot(x * scale - event.clientX + left, y * scale - event.clientY + top);
    const near = shown.places.reduce((a, b) => (far(b) < far(a) ? b : a), {x: Infinity, y: 0});
    go(far(near) < 45 ? near : undefined);
  };
  plot.onpointerleave = plot.onblur = () => go();
  plot.onclick = () => choose(now?.key);
  plot.onkeydown = event => {
    const [down, right] = MOVES[event.key] ?? [];
    const rows = [...new Set(shown.places.map(place => place.row))];
    const within = (list, i) => list[Math.max(0, Math.min(i, list.length - 1))];
    if (event.key === "Enter") choose(now?.key);
    if (event.key === "Escape") go();
    if (down === undefined || !rows.length) return;
    event.preventDefault();
    const row = within(rows, rows.indexOf(now?.row) + down);
    const inRow = shown.places.filter(place => place.row === row);
    go(within(inRow, (now?.i ?? -1) + right));
  };
  function show() {
    shown = of(Math.max(280, plot.clientWidth));
    plot.replaceChildren(shown.svg);
    mark();
  }
  const buttons = Object.keys(saved).map(kind =>
    make("button", {
      type: "button",
      textContent: kind,
      title: `Save as ${kind}`,
      onclick: () => download(`${document.title} ${heading.textContent}.${kind.toLowerCase()}`, saved[kind](id)),
    }),
  );
  parent.append(make("figure", {id}, make("figcaption", {}, heading, ...buttons), plot, reading));
  figures[id] = {heading, of, show};
}

const show = (...ids) => (ids.length ? ids : Object.keys(figures)).forEach(id => figures[id].show());
addEventListener("resize", () => show());
// Draw for paper before the browser counts its sheets: a chart that grows later has no room on them.
addEventListener("beforeprint", () => {
  document.documentElement.style.fontSize = "12px";
  document.body.style.width = "700px";
  show();
  document.documentElement.style.fontSize = document.body.style.width = "";
});
addEventListener("afterprint", () => show());

// A value in CSV.
function cell(value) {
  if (typeof value === "number") return +value.toPrecision(7);
  const text = value ?? "";
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// A figure as a drawing that stands alone, below its title.
function titled({heading, of}) {
  const {svg} = of(SAVED);
  const {width, height} = svg.viewBox.baseVal;
  const title = write(cut(heading.textContent, 100), 4, 14, {"font-weight": "bold"});
  return drawing(width, height + 22, title, draw("g", {transform: "translate(0 22)"}, ...svg.childNodes));
}

// The files that a figure can be saved as.
const saved = {
  SVG: id => {
    const text = new XMLSerializer().serializeToString(titled(figures[id]));
    // Other programs do not know the page's variables: write the colours of the light theme.
    const {style} = document.styleSheets[0].cssRules[0];
    return text.replace(/var\((--\w+)\)/g, (all, name) => style.getPropertyValue(name).match(/#\w+/)?.[0] ?? all);
  },
  CSV: id =>
    figures[id]
      .of(SAVED)
      .table()
      .map(row => row.map(cell).join(",") + "\n")
      .join(""),
};

function download(name, text) {
  const link = make("a", {href: URL.createObjectURL(new Blob([text])), download: name.replace(/[^\p{L}\p{N}_.+-]+/gu, "_")});
  link.click();
  URL.revokeObjectURL(link.href);
}
