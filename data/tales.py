"""Tales: short stories from a grammar, and a reader that checks each one.

The grammar knows who has which thing. A tale is a walk through RULES, from the state "start" to the state "end". It has
a hero (1) with a toy and a friend (2) with a treasure. Two letters at the end of a state say who has the toy and who
the treasure: h for the hero, f for the friend, l for a toy that is lost. So hf is the beginning, and fh follows a swap.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, zip_longest
from random import Random
from typing import NamedTuple

from data.config import TalesConfig

LISTS = """
girl: Anna, Clara, Emma, Iris, Julia, Lily
boy: Adam, Ben, David, Emil, Felix, Hugo
colour: red, blue, green, yellow, white, black
toy: ball, boat, drum, horse, kite, robot
treasure: shell, feather, whistle, compass, mirror, button
elder: mother, father, grandmother, grandfather, aunt, uncle
home: by the sea, on a farm, beside a river, on a green hill, in a quiet valley, near an old tower, on an island
place: the market, the old mill, the lake, the bridge, the school, the fountain, the harbour, the park, the station
day: One sunny morning, One windy day, One Sunday in spring, On the first day of summer, Early one morning, After lunch
food: pancakes, apple pie, strawberries, bread and honey, plum cake, cherries, ginger biscuits
spot: under a bush, behind a wall, beside the well, in the tall grass, on a bench, between two stones
animal: duck, cat, dog, goose, squirrel, hedgehog, donkey, goat
"""
WORDS = {kind: words.split(", ") for kind, words in re.findall("(.*): (.*)", LISTS)}
WORDS["name"] = WORDS["girl"] + WORDS["boy"]
# The words that follow from a name, for a girl and for a boy.
PRONOUNS = {"he": ("she", "he"), "him": ("her", "him"), "his": ("her", "his"), "child": ("girl", "boy")}
# The names of slips, by the word in braces that differs from the one before.
SLIPS = {"name": "a name", "toy": "a thing", "treasure": "a thing", "colour": "a colour"}
SLIPS |= dict.fromkeys(PRONOUNS, "a pronoun")

# Each line is a state, the next state and the sentences between them, with words in braces. XY is each of PAIRS.
PAIRS = ("hf", "fh", "ff", "hh", "lf")
RULES = """
start own | {name1} was a {child1} who lived {home} with {his1} {elder}.
start own | Once upon a time a {child1} named {name1} lived {home} with {his1} {elder}.
start own | {home} lived a {child1} named {name1} with {his1} {elder}.
start own | There was once a {child1} called {name1}, and {he1} lived {home} with {his1} {elder}.

own way | {he1} had a {colour} {toy}, and {he1} loved it more than anything.
own way | Of all {his1} toys {he1} liked {his1} {colour} {toy} best.
own way | On {his1} birthday {his1} {elder} gave {him1} a {colour} {toy}.
own way | {his1} {elder} had made {him1} a {colour} {toy}.
own way | {he1} never left the house without {his1} {colour} {toy}.

way there | {day} {name1} took the {colour} {toy} to {place}.
way there | {day} {he1} carried it all the way to {place}.
way there | {day} {his1} {elder} said, "Take your {colour} {toy} and play at {place}."

there met | There {he1} met {name2}, who had a {treasure}.
there met | A {child2} named {name2} was sitting there with a {treasure}.
there met | "Hello, I am {name2}," said a {child2} who had a {treasure}.
there met | {name2} was there too, playing with a {treasure}.

met hf | "What a fine {colour} {toy}!" said {name2}, and {name1} said, "What a fine {treasure}!"
met hf | {name2} looked at the {colour} {toy}, and {name1} looked at the {treasure}.
met hf | "May I play with your {colour} {toy}?" asked {name2}. "If I may have your {treasure}," said {name1}.
met hf | "I like your {colour} {toy}," said {name2}. "I like your {treasure}," said {name1}.
met hf | They played with the {colour} {toy} and the {treasure} until they were hungry.

hf fh | So they swapped: {name1} got the {treasure} and {name2} got the {colour} {toy}.
hf fh | "Let us trade," said {name1}. {he1} gave {name2} the {colour} {toy} and took the {treasure}.
hf ff | {name1} thought about it, and then {he1} gave {him2} the {colour} {toy}.
hf ff | "You may have it," said {name1} and put the {colour} {toy} into {his2} hands.
hf hh | But {name2} was tired of the {treasure}, so {he2} gave it to {name1}.
hf hh | "Take this," said {name2} and gave {him1} the {treasure}.
hf lf | They ran and jumped and climbed, and when they looked around, the {colour} {toy} was gone.
hf lf | Then they played hide and seek, and nobody knew any more where the {colour} {toy} was.

fh evehf | Soon they missed their own things, so they swapped back.
ff evehf | After a while {name2} gave the {colour} {toy} back.
hh evehf | But {name1} saw that {name2} was sad, and {he1} gave the {treasure} back.
lf evehf | "There it is!" cried {name1}. It was {spot}, and {he1} was glad to have it back.
XY eveXY | They played on until the sun stood low.
XY eveXY | A {animal} came by and watched them for a while.
XY eveXY | Then they sat down together and made up a song about a {animal}.

eveXY askXY | When {name1} came home, {his1} {elder} asked, "Where is your {colour} {toy}?"
eveXY askXY | In the evening {his1} {elder} asked {him1}, "What have you done with the {colour} {toy}?"

askhf lasthf | "Here it is," said {name1}, "and {name2} has the {treasure}."
askhf lasthf | {name1} held it up and said, "I still have it."
askfh lastfh | "{name2} has it now," said {name1}, "and I have the {treasure}."
askfh lastfh | {name1} showed {his1} {elder} the {treasure} and said, "I swapped with {name2}."
askff lastff | "{name2} has it now," said {name1}, "and the {treasure} too."
askff lastff | "I gave it to {name2}," said {name1}.
askhh lasthh | "Here it is," said {name1}, "and I have the {treasure} of {name2} too."
askhh lasthh | {name1} laughed, for {he1} had the {colour} {toy} in one hand and the {treasure} in the other.
asklf lastlf | "I lost it," said {name1}. "Then we will look for it tomorrow," said {his1} {elder}.

lastXY end | {his1} {elder} smiled, and they ate {food} together.
lastXY end | That night {name1} dreamed of {name2}.
lasthf end | And {he1} put the {colour} {toy} beside {his1} bed.
lastfh end | And {he1} played with the {treasure} until it was time for bed.
lastfh end | So the {colour} {toy} stayed with {name2}, and {name1} was glad to have a friend.
lastff end | "You have a kind heart," said {his1} {elder}.
lasthh end | "Tomorrow you must give {name2} something nice," said {his1} {elder}.
"""


class Rule(NamedTuple):
    """A line of RULES with one of PAIRS."""

    state: str
    next_state: str
    sentences: str
    slots: list[str]
    """The words in braces, in their order."""
    pattern: re.Pattern[str]
    """Matches the sentences in lower case, with a group for each slot."""


def read_rules() -> Iterator[Rule]:
    """Yield the rules of the grammar."""
    vocabulary = WORDS | PRONOUNS
    # A pattern is the sentences with each slot replaced by a group of all its words.
    for line in filter(None, RULES.splitlines()):
        states, sentences = line.split(" | ")
        slots = re.findall(r"{(\w+)}", sentences)
        choices = [f"({'|'.join(vocabulary[slot.rstrip('12')])})" for slot in slots]
        texts = map(re.escape, re.split(r"{\w+}", sentences))
        pattern = "".join(chain.from_iterable(zip_longest(texts, choices, fillvalue="")))
        for pair in PAIRS if "XY" in states else ("",):
            state, next_state = states.replace("XY", pair).split()
            yield Rule(state, next_state, sentences, slots, re.compile(f"{pattern.lower()}(?: |$)"))


GRAMMAR: dict[str, list[Rule]] = defaultdict(list)
for each in read_rules():
    GRAMMAR[each.state].append(each)


def tales(config: TalesConfig) -> Iterator[str]:
    """Yield `count` tales; the n-th depends on the seed alone."""
    random = Random(config.seed)
    for _ in range(config.count):
        # Draw the words of this tale.
        words = {kind: random.choice(choices) for kind, choices in WORDS.items()}
        hero_is_boy = random.random() < 0.5
        # One girl and one boy: so he and she say who is meant.
        for who, is_boy in (("1", hero_is_boy), ("2", not hero_is_boy)):
            words[f"name{who}"] = words["boy" if is_boy else "girl"]
            words |= {f"{kind}{who}": forms[is_boy] for kind, forms in PRONOUNS.items()}
        # Walk through the rules.
        state = "start"
        steps = []
        while state != "end":
            rule = random.choice(GRAMMAR[state])
            steps.append(rule.sentences.format(**words))
            state = rule.next_state
        # A sentence begins in upper case, in quotes too.
        yield " ".join(re.sub(r'(?:^|\. "?)[a-z]', lambda begin: begin[0].upper(), step) for step in steps)


def first_slip(tale: str) -> str | None:
    """Return the kind of the first wrong word or sentence of a tale; None if there is none."""
    tale = tale.lower()
    state = "start"
    position = 0
    known: dict[str, str | bool] = {}
    while state != "end":
        # Find the rule of the next sentences. If only rules of other states match, somebody else has the thing.
        matches = {}
        for rule in chain.from_iterable(GRAMMAR.values()):
            if match := rule.pattern.match(tale, position):
                matches[rule.state] = (rule, match)
        if state not in matches:
            return "who has it" if matches else "a sentence"
        rule, match = matches[state]
        # Compare its words with those before. A name also tells which pronouns follow.
        for slot, word in zip(rule.slots, match.groups(), strict=True):
            kind = slot.rstrip("12")
            facts: dict[str, str | bool] = {slot: word}
            if kind == "name":
                facts[f"is_boy{slot[-1]}"] = word.capitalize() in WORDS["boy"]
            elif kind in PRONOUNS:
                facts = {f"is_boy{slot[-1]}": word == PRONOUNS[kind][True]}
            if any(known.setdefault(fact, value) != value for fact, value in facts.items()):
                return SLIPS.get(kind, "another word")
        if known.get("is_boy2") == known["is_boy1"]:
            return SLIPS["name"]
        state = rule.next_state
        position = match.end()
    return None if position == len(tale) else "a sentence"
