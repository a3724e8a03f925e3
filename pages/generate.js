// Text by a GPT: generation/generate.py for one text, with the predictions and the attention at each token.

const LIKELY = 10;  // predictions for a token

// A text as the model reads it, token by token. `chances` (V) predict the next token. A place is a token:
//
// id       of the token
// bits     its surprise; null for the first token
// start    the first place of its context
// heads    for each head the attention weights (S) of its context
// streams  the residual stream (C) as embedded, then after each attention and each MLP
class Reading {
  // off: the names of the parts without which the model reads.
  constructor(model, tokenizer, off = new Set()) {
    this.model = model;
    this.tokenizer = tokenizer;
    this.off = off;
    this.reads = 0;
    this.spent = 0;  // milliseconds
    this.places = [];
    this.fill(0, 0);
  }

  // Read one more token. When the context is full, its last half is read again.
  read(id) {
    const began = performance.now();
    const {block_size} = this.model.config;
    const bits = this.chances ? -Math.log2(this.chances[id]) : null;
    const count = this.places.push({id, bits});
    const half = Math.max(1, Math.floor(block_size / 2));
    if (count - this.start > block_size) this.fill(count - half, count - 1);
    this.predict();
    this.reads++;
    this.spent += performance.now() - began;
  }

  // Take back all tokens but the first `count`.
  cut(count) {
    this.places.length = count;
    const {start} = this.places[count - 1];
    if (start === this.start) this.cache.ids.length = count - 1 - start;
    else this.fill(start, count - 1);
    this.predict();
  }

  // Begin a context with the tokens from `start` to before `end`.
  fill(start, end) {
    this.start = start;
    this.cache = this.model.cache(this.off);
    for (const {id} of this.places.slice(start, end)) this.model.forward(id, this.cache);
  }

  // Read the last token, and predict the next one.
  predict() {
    const place = this.places.at(-1);
    const {logits, heads, streams} = this.model.forward(place.id, this.cache);
    Object.assign(place, {start: this.start, heads, streams});
    this.logits = logits;
    this.chances = softmax(new Float64Array(logits));
    if (!isFinite(sum(logits))) throw new RangeError("The model's logits are not finite.");
  }

  // The chances (V) of the token at a place, or of the one after the text. stream: the number of an earlier residual
  // stream, for the chances if the model ended there.
  chancesAt(place, stream = -1) {
    return softmax(new Float64Array(this.model.logits(this.places[place - 1].streams.at(stream))));
  }

  // The likeliest of some chances, [id, chance] in descending order; an id without a text is never written.
  likeliest(chances, count = LIKELY) {
    const known = chances.map((chance, id) => (this.tokenizer.has(id) ? chance : -1));
    const least = Math.max(0, known.toSorted().at(-count) ?? 0);
    const ids = [...known.keys()].filter(id => known[id] >= least);
    ids.sort((one, other) => chances[other] - chances[one]);
    return ids.slice(0, count).map(id => [id, chances[id]]);
  }

  // Write up to `max_new_tokens` more tokens, and yield the id of each. Returns "end" if the model ended the document, or
  // "length".
  *write({max_new_tokens, seed, ...settings}) {
    const random = uniforms(seed);
    for (let n = 0; n < max_new_tokens; n++) {
      const id = this.sample(settings, random);
      if (id === this.tokenizer.end) return "end";
      this.read(id);
      yield id;
    }
    return "length";
  }

  // Sample the next token. temperature divides the logits, and 0 takes the likeliest token; top_k keeps the k likeliest
  // (Fan et al. 2018), top_p the fewest likeliest whose probabilities reach p (Holtzman et al. 2020).
  sample({temperature, top_k, top_p}, random) {
    const known = this.logits.map((logit, id) => (this.tokenizer.has(id) ? logit : -Infinity));
    if (temperature === 0) return known.indexOf(largest(known));
    let scores = new Float64Array(known).map(logit => logit / temperature);
    if (top_k) {
      const least = scores.toSorted().at(-top_k) ?? -Infinity;
      scores = scores.map(score => (score < least ? -Infinity : score));
    }
    const chances = softmax(scores);
    if (top_p < 1) {
      // A token is dropped if the likelier ones already reach p; of equal ones the first ids are the likelier. Their sum
      // is rounded as sample.py rounds it: 0.4 and 0.3 reach 0.7.
      let likelier = 0;
      for (const id of [...chances.keys()].sort((one, other) => chances[other] - chances[one])) {
        const dropped = likelier > 0 && Math.fround(likelier) >= Math.fround(top_p); // the likeliest stays
        likelier += Math.fround(chances[id]);
        if (dropped) chances[id] = 0;
      }
    }
    // Inverse transform sampling: the token at which the running sum passes a random share of the total.
    let left = random.next().value * sum(chances);
    return chances.findIndex(chance => (left -= chance) < 0);
  }
}

// Mersenne Twister (Matsumoto & Nishimura 1998): float32 numbers from 0 to 1, as torch.rand(1) draws them from a seed.
function* uniforms(seed) {
  const state = new Uint32Array(624);
  state[0] = seed;
  for (let i = 1; i < 624; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;
  for (;;) {
    for (let i = 0; i < 624; i++) {
      const y = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
      state[i] = state[(i + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
    }
    for (let y of state) {
      y ^= y >>> 11;
      y ^= (y << 7) & 0x9d2c5680;
      y ^= (y << 15) & 0xefc60000;
      y ^= y >>> 18;
      yield (y & 0xffffff) / 2 ** 24;
    }
  }
}
