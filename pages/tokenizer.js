// Text to token ids and back: byte-pair encoding (Sennrich et al. 2016) over the bytes of UTF-8, as tiktoken has it.
// Bytes are strings here, a character for each byte, so that a Map finds them.
class Tokenizer {
  // pattern: a regular expression that cuts text into pieces; tokens: their bytes in base64 by id, null for an id
  // without a token; special: ids of special tokens by name.
  constructor({pattern, tokens, special}) {
    this.pattern = new RegExp(pattern, "gu");
    this.bytesOf = tokens.map(token => (token === null ? null : atob(token)));
    this.idOf = new Map(this.bytesOf.map((bytes, id) => [bytes, id]));
    for (const [name, id] of Object.entries(special)) this.bytesOf[id] = toBytes(name);
    this.end = special["<|endoftext|>"];
  }

  // Whether an id has a text: a published vocabulary has gaps, and a model may have more ids than its tokenizer.
  has(id) {
    return this.bytesOf[id] != null;
  }

  // The ids of a text. Names of special tokens are text like any other, and half a surrogate pair becomes U+FFFD.
  encode(text) {
    const pieces = [...text.toWellFormed().matchAll(this.pattern)];
    return pieces.flatMap(([piece]) => this.merge(toBytes(piece)));
  }

  // The ids of a piece: join the two neighbours whose token has the lowest id, until no two make a token.
  merge(piece) {
    if (this.idOf.has(piece)) return [this.idOf.get(piece)];
    const parts = [...piece];
    const joined = i => (i + 1 < parts.length ? this.idOf.get(parts[i] + parts[i + 1]) : undefined) ?? Infinity;
    const ids = parts.map((_, i) => joined(i));  // of each part joined to the next one
    for (;;) {
      let best = 0;
      for (let i = 1; i < ids.length; i++) if (ids[i] < ids[best]) best = i;
      if (ids[best] === Infinity) break;
      parts.splice(best, 2, parts[best] + parts[best + 1]);
      ids.splice(best, 1);
      ids[best] = joined(best);
      if (best) ids[best - 1] = joined(best - 1);
    }
    return parts.map(part => this.idOf.get(part));
  }

  // The text of ids; bytes that are no UTF-8 become U+FFFD.
  decode(ids) {
    return this.decodeEach(ids).join("");
  }

  // The text that each id completes: a character of several tokens belongs to the last one.
  decodeEach(ids) {
    const decoder = new TextDecoder("utf-8", {ignoreBOM: true});
    const texts = ids.map(id => decoder.decode(fromBytes(this.bytesOf[id]), {stream: true}));
    if (ids.length) texts[ids.length - 1] += decoder.decode();
    return texts;
  }
}

const utf8 = new TextEncoder();
const toBytes = text => Array.from(utf8.encode(text), byte => String.fromCharCode(byte)).join("");
const fromBytes = bytes => Uint8Array.from(bytes, byte => byte.charCodeAt(0));
