// A text as a list of tokens to choose from, tinted by figures, and tables of tokens.
const WORST = 12;  // bits of surprise at which the colour is deepest

// Tint an element in a colour of the kit. share: 0 is none, 1 and above all of it.
function tint(element, colour, share) {
  element.style.setProperty("--share", `${(100 * Math.min(1, share)).toFixed()}%`);
  element.style.setProperty("--tint", `var(--${colour})`);
  return element;
}

// Show the tints of some figures, {name: [colour, share]}.
function drawLegend(steps) {
  const entries = Object.entries(steps);
  $("legend").replaceChildren(
    ...entries.map(([textContent, look]) => tint(make("i", {className: "tinted", textContent}), ...look)),
  );
}

// Token number i of the text. text: as it is shown, empty if it is part of a character; name: as it is read out.
function tokenSpan(i, text, name, bits) {
  const ariaLabel = `${name}${bits == null ? "" : `, ${bits.toFixed(1)} bits`}`;
  const span = make("span", {className: "tinted", role: "option", id: `t${i}`, ariaSelected: "false", ariaLabel});
  const end = () => make("i", {className: "end"});
  span.append(...text.split(/(?=\n)/).flatMap(line => (line[0] === "\n" ? [end(), line] : [line])));
  if (!text) span.append(make("i", {className: "part", title: name}));
  return span;
}

// Mark the chosen one of the spans in place of another one; null is none.
function markChosen(spans, before, chosen) {
  spans[before]?.setAttribute("aria-selected", "false");
  spans[chosen]?.setAttribute("aria-selected", "true");
  spans[chosen]?.scrollIntoView({block: "nearest"});
  if (chosen === null) $("text").removeAttribute("aria-activedescendant");
  else $("text").setAttribute("aria-activedescendant", `t${chosen}`);
}

// Call choose() with the place of the token that is clicked or reached by a key, or with null. chosen(): the place now.
function listenToText(spansOf, chosen, choose) {
  $("text").onclick = event => {
    const span = event.target.closest("[role=option]");
    if (span) choose(spansOf().indexOf(span));
  };
  $("text").onkeydown = event => {
    const last = spansOf().length - 1;
    const before = Math.max(0, (chosen() ?? last + 1) - 1);
    const after = Math.min(last, (chosen() ?? -1) + 1);
    const to = {
      ArrowLeft: before,
      ArrowUp: before,
      ArrowRight: after,
      ArrowDown: after,
      Home: 0,
      End: last,
      Escape: null,
    }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(to);
  };
}

// A row of a table of tokens, with a bar for its weight. token: its text, or an element in its place.
function tokenRow(token, cells, weight, share, own) {
  const bar = make("td", {textContent: percent(weight)});
  bar.style.background = `linear-gradient(to right, var(--cell) ${100 * Math.min(1, share)}%, transparent 0)`;
  return make(
    "tr",
    {className: own ? "own" : ""},
    make("td", {className: "code"}, token),
    ...cells.map(textContent => make("td", {textContent})),
    bar,
  );
}
