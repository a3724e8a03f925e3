// Charts: lines and markers over two axes with a legend, grids of cells, and maps of attention weights.
const short = (figure, digits = 3) => {
  const x = +figure.toPrecision(digits);  // 999,960 is 1M
  if (Math.abs(x) >= 1e15) return x.toExponential(1).replace("e+", "e");
  for (const [size, unit] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (Math.abs(x) >= size) return +(x / size).toPrecision(digits) + unit;
  }
  return String(x);
};

const round = x => +x.toPrecision(5);

// Tick values: at least two round numbers between two ends, and at most `most` if possible.
function ticks(from, to, most, logarithmic) {
  const powers = [];
  if (logarithmic) for (let i = Math.floor(Math.log10(from)); i <= Math.log10(to); i++) powers.push(i);
  for (const digits of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1]]) {
    const inside = powers.flatMap(power => digits.map(digit => digit * 10 ** power)).filter(x => x >= from && x <= to);
    if (inside.length > 1 && inside.length <= most) return inside;
  }
  for (let count = most; ; count++) {
    const rough = (to - from) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(digit => digit * power).find(size => size >= rough);
    const found = [];
    for (let i = Math.ceil(from / step); i * step <= to; i++) found.push(i * step);
    if (found.length > 1) return found;
  }
}

// An axis from `start` to `end` in pixels: {to: maps a value to its pixel, labels: [[pixel, text]]}. Texts are exact.
function scale(values, logarithmic, start, end, most) {
  const f = logarithmic ? Math.log10 : Number;
  const back = x => (logarithmic ? 10 ** x : x);
  let low = Infinity;
  let high = -Infinity;
  let digits = 3;
  for (const value of values) [low, high] = [Math.min(low, f(value)), Math.max(high, f(value))];
  const room = high - low > 1e-9 * Math.abs(high) ? (high - low) * 0.03 : Math.abs(low) * 0.1 || 1;
  [low, high] = [low - room, high + room];
  const to = value => start + ((f(value) - low) / (high - low)) * (end - start);
  const round = ticks(back(low), back(high), Math.max(2, most), logarithmic);
  const near = Math.abs(round[1] - round[0]) / 100;
  while (digits < 15 && round.some(value => Math.abs(value - value.toPrecision(digits)) > near)) digits++;
  return {to, labels: round.map(value => [to(value), short(value, digits)])};
}

// Styles of lines and their markers, for the values of a second setting; the last one is for all further values.
const STYLES = [
  {dash: "none"},
  {dash: "8 5", hollow: true},
  {dash: "2 4", square: true},
  {dash: "12 4 2 4", square: true, hollow: true},
  {dash: "1 8"},
];

function marker([x, y], size, {square, hollow}) {
  const look = hollow ? {fill: "var(--paper)", "stroke-width": 1.5} : {stroke: "none"};
  if (!square) return draw("circle", {cx: x, cy: y, r: size, ...look});
  return draw("rect", {x: x - size, y: y - size, width: 2 * size, height: 2 * size, ...look});
}

// The legend, colours before styles, and the height that it takes.
function legend(lines, width) {
  const colours = lines.filter(line => line.legend).map(line => [line.legend, {colour: line.colour}]);
  const styles = lines
    .filter(line => line.styleLegend)
    .sort((a, b) => a.style - b.style)
    .map(line => [line.styleLegend, {colour: "var(--ink)", style: STYLES[line.style]}]);
  const entries = new Map([...colours, ...styles]);
  const wide = styles.length ? 30 : 14;
  const group = draw("g");
  let x = 8;
  let y = 14;
  for (const [text, {colour, style}] of entries) {
    const shown = cut(text, Math.floor(width / 9));
    const size = wide + 18 + widthOf(shown);
    if (x > 8 && x + size > width) {
      x = 8;
      y += 19;
    }
    const sample = draw("g", {stroke: colour, fill: colour});
    sample.append(
      draw("path", {d: `M${x} ${y - 4}h${wide}`, "stroke-width": 3, "stroke-dasharray": style?.dash ?? "none"}),
    );
    if (style) sample.append(marker([x + wide / 2, y - 4], 4, style));
    group.append(sample, write(shown, x + wide + 5, y));
    x += size;
  }
  return [group, entries.size ? y + 12 : 8];
}

// Draw both axes; returns the left edge, and a function that gives a point's place.
function axes(svg, {x, y, logarithmic = [], top = Infinity}, points, width, above, below) {
  const known = points.filter(point => point[y] !== null);
  const heights = known.flatMap(point => [point.lowest ?? point[y], point.highest ?? point[y]]);
  const down = scale(
    heights.map(value => Math.min(value, top)),
    logarithmic[1],
    below,
    above,
    (below - above) / 35,
  );
  const left = 28 + Math.max(...down.labels.map(([, text]) => widthOf(text)));
  const across = scale(
    points.map(point => point[x]),
    logarithmic[0],
    left,
    width - 12,
    (width - left) / 90,
  );
  const line = ends => draw("line", {...ends, stroke: "var(--line)"});
  for (const [at, text] of across.labels) {
    const middle = Math.min(at, width - widthOf(text) / 2);  // the last one stays inside the drawing
    svg.append(line({x1: at, x2: at, y1: above, y2: below}), write(text, middle, below + 17, MIDDLE));
  }
  for (const [at, text] of down.labels) {
    svg.append(line({x1: left, x2: width - 4, y1: at, y2: at}), write(text, left - 6, at + 4, END));
  }
  svg.append(write(x, (left + width) / 2, below + 35, MIDDLE));
  svg.append(write(y, 0, 0, {...MIDDLE, transform: `translate(12 ${(above + below) / 2}) rotate(-90)`}));
  return {left, place: (point, name = y) => [across.to(point[x]), down.to(point[name])]};
}

// A path through places; a single one is a dash of two pixels.
function path(places) {
  const [[x, y]] = places;
  if (places.length === 1) return `M${(x - 1).toFixed(1)} ${y.toFixed(1)}h2`;
  return `M${places.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;
}

// The runs of neighbours between a line's gaps, at which a point's height is null.
function pieces(points, y) {
  const found = [[]];
  for (const point of points) {
    if (point[y] !== null) found.at(-1).push(point);
    else if (found.at(-1).length) found.push([]);
  }
  return found.filter(piece => piece.length);
}

// A line's drawing: its band, itself, its markers. Where it has gaps, so have they.
function trace(line, place, y) {
  const group = draw("g", {stroke: line.colour, fill: line.colour, opacity: line.faded ? 0.25 : 1});
  const whole = pieces(line.points, y);
  const places = whole.flat().map(point => place(point));
  for (const piece of whole[0]?.[0].lowest === undefined ? [] : whole) {
    const bounds = ["highest", "lowest"].map(name => piece.map(point => place(point, name)));
    group.append(draw("path", {d: path([...bounds[0], ...bounds[1].reverse()]), "fill-opacity": 0.18, stroke: "none"}));
  }
  const style = STYLES[line.style ?? 0];
  const stroke = {"stroke-width": line.wide ? 3 : 1.5, "stroke-linejoin": "round", "stroke-dasharray": style.dash};
  const d = whole.map(piece => path(piece.map(point => place(point)))).join("");
  if (line.joined !== false) group.append(draw("path", {d, fill: "none", ...stroke}));
  const hasMarkers = line.markers ?? (line.joined === false || places.length < 30);
  if (line.ring) {
    group.append(...places.map(([cx, cy]) => draw("circle", {cx, cy, r: 7, fill: "none", "stroke-width": 2})));
  } else if (hasMarkers) group.append(...places.map(place => marker(place, line.wide ? 4.5 : 3, style)));
  return group;
}

// Lines over two axes. spec: {x, y: names of a point's values, lines, logarithmic: [x, y], top: of y, names: of cells}.
// A line is {name, colour, points: [{NAME: number}]}; a y of null is a gap. It may have a key, passed to point() and choose(); a legend and a
// styleLegend; `of`, the cells before its points in the saved table; joined: false for markers alone; markers: false.
// `lowest` and `highest` of a point bound a band.
let drawn = 0;

function plot(spec, width, height = 300) {
  const {x, y, logarithmic = [], names = ["line"]} = spec;
  const id = `inside${drawn++}`;
  const can = point => [x, y].every((name, i) => !logarithmic[i] || point[name] === null || point[name] > 0);
  const isKnown = point => point[y] !== null;
  const lines = spec.lines
    .map(line => ({...line, points: line.points.filter(can)}))
    .filter(line => line.points.some(isKnown));
  const columns = [...new Set(lines.flatMap(line => line.points.flatMap(Object.keys)))];
  const cells = (line, point) => [...(line.of ?? [line.name]), ...columns.map(name => point[name])];
  const table = () => [[...names, ...columns], ...lines.flatMap(line => line.points.map(point => cells(line, point)))];
  if (!lines.length)
    return {svg: drawing(width, 50, write("Nothing has been measured yet.", 8, 28)), places: [], table};
  const [key, above] = legend(lines, width);
  const svg = drawing(width, above + height, key);
  const below = above + height - 42;
  const {left, place} = axes(
    svg,
    spec,
    lines.flatMap(line => line.points),
    width,
    above,
    below,
  );
  const inside = draw("rect", {x: left, y: above - 8, width, height: below - above + 16});
  svg.append(
    draw("clipPath", {id}, inside),
    draw("g", {"clip-path": `url(#${id})`}, ...lines.map(line => trace(line, place, y))),
  );
  const range = ({lowest, highest}) => (lowest === undefined ? "" : `, from ${round(lowest)} to ${round(highest)}`);
  const places = lines.flatMap(line =>
    line.points.filter(isKnown).map((point, i) => {
      const [px, py] = place(point);
      const text = `${line.name}: ${round(point[y])} at ${short(point[x], 4)} ${x}${range(point)}`;
      return {row: line.name, i, x: px, y: py, text, key: line.key};
    }),
  );
  return {svg, places, table};
}

// A grid of cells with names beside and above it. values: by row, null for an empty cell; least and most: bounds of a
// cell's width; high: its height, the width if left out. paint(value, x, y, wide, high, key) returns a cell's drawing,
// told(value, down, across) its description.
function matrix({down, across, values, least, most, high, paint, told, table}, width) {
  const [left, widest] = [down, across].map(names => 8 + Math.max(...names.map(widthOf)));
  const wide = Math.floor(Math.max(least, Math.min(most, (width - left - 56) / across.length)));
  const upright = widest > wide + 8;
  const above = upright ? widest : 20;
  const tall = high ?? wide;
  const places = [];
  const font = {"font-size": Math.min(12, tall)};
  const svg = drawing(left + wide * across.length + 56, above + tall * down.length + 2);
  across.forEach((name, i) => {
    const x = left + (i + 0.5) * wide;
    const turned = {...font, transform: `translate(${x + 4} ${above - 5}) rotate(-90)`};
    svg.append(upright ? write(name, 0, 0, turned) : write(name, x, 14, MIDDLE));
  });
  values.forEach((cells, row) => {
    const y = above + row * tall;
    svg.append(write(down[row], left - 6, y + tall / 2 + 4, {...font, ...END}));
    cells.forEach((value, i) => {
      const x = left + i * wide;
      const place = {row, i, x: x + wide / 2, y: y + tall / 2, key: `${row} ${i}`};
      if (value == null) return;
      svg.append(...paint(value, x, y, wide, tall, place.key));
      places.push({...place, text: told(value, down[row], across[i])});
    });
  });
  return {svg, places, table, end: [left + wide * across.length, above + tall * down.length]};
}

// A map of shares from 0 to 1, by rows of `size`: one path for each of 12 shades. The square root shows small shares too.
const SHADES = 12;

function shades({size, shares}, x, y, wide, high = wide) {
  const rows = shares.length / size;
  const paths = Array(SHADES + 1).fill("");
  shares.forEach((share, i) => {
    paths[Math.round(SHADES * Math.sqrt(share))] += `M${i % size} ${Math.floor(i / size)}h1v1h-1z`;
  });
  const drawn = paths.map((d, shade) => draw("path", {d, "fill-opacity": (shade / SHADES).toFixed(2)})).slice(1);
  const ground = draw("rect", {width: size, height: rows, fill: "var(--field)"});
  const how = {"shape-rendering": "crispEdges"};
  return draw(
    "g",
    {transform: `translate(${x} ${y}) scale(${wide / size} ${high / rows})`, fill: "var(--map)", ...how},
    ground,
    ...drawn,
  );
}

// Small maps of all heads, a row for each layer, both counted from 1. heads: their number by layer; mapOf(layer, head) returns {size, shares}.
function smallMaps(heads, mapOf, chosen, width) {
  const numbers = count => Array.from({length: count}, (_, i) => `${i + 1}`);
  const frame = {fill: "none", stroke: "var(--mark)", "stroke-width": 2};
  const values = heads.map((count, layer) => Array.from({length: count}, (_, head) => mapOf(layer, head)));
  const paint = (map, x, y, side, _, key) => [
    shades(map, x, y, side - 5),
    ...(key === chosen ? [draw("rect", {x, y, width: side - 5, height: side - 5, ...frame})] : []),
  ];
  const cells = ({size, shares}) =>
    Array.from(shares, (share, i) => [Math.floor(i / size), i % size, +share.toPrecision(3)]);
  const table = () => [
    ["layer", "head", "row", "column", "weight"],
    ...values.flatMap((maps, layer) => maps.flatMap((map, head) => cells(map).map(cell => [layer + 1, head + 1, ...cell]))),
  ];
  const told = (_, layer, head) => `layer ${layer}, head ${head}`;
  return matrix(
    {down: numbers(heads.length), across: numbers(Math.max(...heads)), values, least: 20, most: 86, paint, told, table},
    width,
  );
}
