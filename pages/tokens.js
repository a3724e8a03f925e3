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
  const spoken = name.startsWith("‹") && text ? `${text} ${name}` : name;  // bytes with whole characters among them
  const ariaLabel = `${spoken}${bits == null ? "" : `, ${bits.toFixed(1)} bits`}`;
  const span = make("span", {className: "tinted", role: "option", id: `t${i}`, ariaSelected: "false", ariaLabel});
  const end = () => make("i", {className: "end"});
  span.append(...text.split(/(?=\n)/).flatMap(line => (line[0] === "\n" ? [end(), line] : [line])));
  if (!text) span.append(make("i", {className: "part", title: name}));
  return span;
}

// Mark a token as the chosen one; null is none.
function markChosen(place) {
  const text = $("text");
  const span = text.children[place];
  text.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
  span?.setAttribute("aria-selected", "true");
  span?.scrollIntoView({block: "nearest"});
  if (span) text.setAttribute("aria-activedescendant", span.id);
  else text.removeAttribute("aria-activedescendant");
}

// Call choose() with the place of the token that is clicked or reached by a key, or with null.
function listenToText(choose) {
  const text = $("text");
  const places = () => [...text.children];
  text.onclick = event => {
    const span = event.target.closest("[role=option]");
    if (span) choose(places().indexOf(span));
  };
  text.onkeydown = event => {
    const now = places().findIndex(span => span.id === text.getAttribute("aria-activedescendant"));
    const last = text.children.length - 1;
    const before = now < 0 ? last : Math.max(0, now - 1);
    const after = Math.min(last, now + 1);
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

// A row of a table of tokens, with a bar for its share, from 0 to 1. token: an element that shows it.
function tokenRow(token, share, own) {
  const bar = make("td", {textContent: percent(share)});
  bar.style.background = `linear-gradient(to right, var(--cell) ${100 * share}%, transparent 0)`;
  return make("tr", {className: own ? "own" : ""}, make("td", {className: "code"}, token), bar);
}
