// A GPT in plain JavaScript: model/gpt.py and model/attention/layer.py for one token at a time, with a KV cache.
//
// Read GPT.forward, then attention. A vector is a Float32Array; a matrix (N, C) is one too, row after row. C is the width
// of the residual stream, V the size of the vocabulary, D the channels of a head, H the number of query heads and Hkv that
// of key/value heads. The token at `position` sees S = position + 1 keys.

const add = (x, y) => x.map((value, c) => value + y[c]);
const sum = values => values.reduce((a, b) => a + b, 0);
const largest = values => values.reduce((a, b) => Math.max(a, b));
const sigmoid = x => 1 / (1 + Math.exp(-x));
const silu = x => x * sigmoid(x);
const softplus = x => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));

// Σ x[c] y[c]
function dot(x, y) {
  let total = 0;
  for (let c = 0; c < x.length; c++) total += x[c] * y[c];
  return total;
}

// W x + b: (C) -> (N)
function linear({weight, bias}, x) {
  const C = x.length;
  const N = weight.length / C;
  const y = new Float32Array(N);
  let n = 0;
  // Four rows at a time: a processor can add to one total before it is done with another.
  for (; n + 3 < N; n += 4) {
    let first = 0;
    let second = 0;
    let third = 0;
    let fourth = 0;
    for (let c = 0; c < C; c++) {
      const i = n * C + c;
      first += weight[i] * x[c];
      second += weight[i + C] * x[c];
      third += weight[i + 2 * C] * x[c];
      fourth += weight[i + 3 * C] * x[c];
    }
    y[n] = first;
    y[n + 1] = second;
    y[n + 2] = third;
    y[n + 3] = fourth;
  }
  for (; n < N; n++) y[n] = dot(x, row(weight, n, C));
  return bias ? add(y, bias) : y;
}

// Row i of a matrix whose rows have C numbers, as a view.
const row = (matrix, i, C) => matrix.subarray(i * C, (i + 1) * C);

// x w / √(mean(x²) + ε) (Zhang & Sennrich 2019)
function rmsNorm({weight}, x, eps) {
  const scale = 1 / Math.sqrt(dot(x, x) / x.length + eps);
  return x.map((value, c) => value * scale * weight[c]);
}

// (x − mean) w / √(variance + ε) + b (Ba et al. 2016)
function layerNorm({weight, bias}, x, eps) {
  const mean = sum(x) / x.length;
  const centred = x.map(value => value - mean);
  const scaled = rmsNorm({weight}, centred, eps);
  return bias ? add(scaled, bias) : scaled;
}

const NORMS = {
  rmsnorm: rmsNorm,
  layernorm: layerNorm,
};

// The error function, to 1.5e-7 (Abramowitz & Stegun 1964, 7.1.26).
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const factors = [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592];
  const series = factors.reduce((total, factor) => (total + factor) * t, 0);
  return Math.sign(x) * (1 - series * Math.exp(-x * x));
}

// The feed-forward network of a block: up, activation, down. SwiGLU multiplies by a gate instead (Shazeer 2020).
const MLPS = {
  swiglu: both => both.subarray(both.length / 2).map((up, i) => silu(both[i]) * up),  // (2 · inner) -> (inner)
  relu2: up => up.map(x => Math.max(0, x) ** 2),
  gelu: up => up.map(x => (x * (1 + erf(x / Math.SQRT2))) / 2),
  gelu_tanh: up => up.map(x => (x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)))) / 2),
};

function mlp({gate_up_proj, up_proj = gate_up_proj, down_proj}, x, kind) {
  return linear(down_proj, MLPS[kind](linear(up_proj, x)));
}

// RoPE (Su et al. 2021): each pair of a head's channels turns by an angle that grows with the position, in place.
function rotate(head, position, {frequencies, length}) {
  frequencies.forEach((frequency, pair) => {
    const angle = position * frequency;
    const cos = length * Math.cos(angle);
    const sin = length * Math.sin(angle);
    const [a, b] = row(head, pair, 2);
    head.set([a * cos - b * sin, a * sin + b * cos], 2 * pair);
  });
}

// PoPE (Gopalakrishnan et al. 2025): (D) -> (2 D), all cosines before all sines.
function place(head, position, frequencies, phase) {
  const D = head.length;
  const placed = new Float32Array(2 * D);
  frequencies.forEach((frequency, c) => {
    const angle = position * frequency - phase(c);
    placed[c] = softplus(head[c]) * Math.cos(angle);
    placed[D + c] = softplus(head[c]) * Math.sin(angle);
  });
  return placed;
}

// Scores to weights that sum to 1. nothing: scores of keys without a value, whose weight goes nowhere.
function softmax(scores, nothing = []) {
  const most = Math.max(largest(scores), ...nothing);
  const exp = score => Math.exp(score - most);  // at most 1
  const weights = scores.map(exp);
  const total = sum(weights) + sum(nothing.map(exp));
  return weights.map(weight => weight / total);
}

// Attention of one layer (Vaswani et al. 2017): the token at `position` gathers from the tokens before it, and itself.
// cache: keys and values of this layer by position, and the heads that are off; shared: values that layers hand to later
// ones. Returns a change to the residual stream (C), and for each head the weights (S).
function attention(layer, x, position, cache, shared) {
  const {heads: H, kv_heads: Hkv, head_dim: D, modifiers} = layer;
  const S = position + 1;
  const split = (vector, first, count) => Array.from({length: count}, (_, h) => row(vector, first + h, D));
  const shares = heads => Array.from({length: H}, (_, h) => heads[Math.floor((h * Hkv) / H)]);

  // Project: one product for all heads, (C) -> ((H + 2 Hkv) · D) -> H queries, Hkv keys and Hkv values (D).
  const projected = linear(layer.qkv_proj, x);
  let q = split(projected, 0, H);
  let k = split(projected, H, Hkv);
  const v = split(projected, H + Hkv, Hkv);
  if (layer.q_norm) {
    q = q.map(head => rmsNorm(layer.q_norm, head, 1e-6));
    k = k.map(head => rmsNorm(layer.k_norm, head, 1e-6));
  }

  // Mix: modifiers of keys and values act before positions enter.
  const call = {x, k, v, position, cache, shared};
  for (const {mix, own} of modifiers) mix?.(own, call);

  // Rotate queries and keys: their products then depend on the distance.
  if (layer.rope) [...q, ...k].forEach(head => rotate(head, position, layer.rope));

  // PoPE instead: a channel's positive length is content, and its angle position.
  if (layer.pope) {
    const phase = Array.from(layer.pope.phase, angle => Math.min(0, Math.max(-2 * Math.PI, angle)));
    q = q.map(head => place(head, position, layer.pope_frequencies, () => 0));
    k = k.map((head, h) => place(head, position, layer.pope_frequencies, c => phase[h * D + c]));
  }

  // Remember: the cache takes the new keys and values. Query heads share them in groups (Ainslie et al. 2023).
  cache.keys[position] = shares(k);
  cache.values[position] = shares(v);

  // See: a score for each head and each key in reach, q · k / √D.
  const first = Math.max(0, S - (layer.window ?? S));
  call.scores = q.map((query, h) => {
    const scores = new Float32Array(S).fill(-Infinity);
    const slope = layer.slopes?.[h] ?? 0;  // of ALiBi's penalty (Press et al. 2022)
    for (let s = first; s < S; s++) scores[s] = dot(query, cache.keys[s][h]) / Math.sqrt(D) - slope * (position - s);
    return scores;
  });
  call.nothing = q.map(() => (layer.form === "softmax1" ? [0] : []));
  for (const {score, own} of modifiers) score?.(own, call);

  // Attend: the mean of the values, by weight.
  const weights = call.scores.map((scores, h) => softmax(scores, call.nothing[h]));
  const merged = new Float32Array(H * D);
  call.y = split(merged, 0, H);
  call.y.forEach((y, h) => {
    for (let s = first; s < S; s++) {
      const value = cache.values[s][h];
      const weight = weights[h][s];
      for (let d = 0; d < D; d++) y[d] += weight * value[d];
    }
  });

  // Finish: modifiers of each head's result.
  for (const {finish, own} of modifiers) finish?.(own, {...call, values: shares(v)});

  // A head that is off adds nothing: model/apart.py.
  for (const h of cache.off) call.y[h].fill(0);

  // Merge the heads, (H · D) -> (C).
  return {change: linear(layer.o_proj, merged), weights};
}

// Changes to a layer, as in model/attention/modifiers.py, each in place. own: the weights of the modifier.
const MODIFIERS = {
  // v ← λ₁ v + λ₂ v₁, with v₁ the values of the first layer that has this modifier (Zhou et al. 2024)
  value_residual: {
    mix({mixture: [own, other]}, {v, shared}) {
      shared.values ??= v.map(head => head.slice());
      v.forEach((head, h) => head.set(head.map((value, d) => own * value + other * shared.values[h][d])));
    },
  },

  // The later half of a key's channels is the previous token's.
  key_offset: {
    mix(own, {k, position, cache}) {
      const half = Math.floor(k[0].length / 2);
      const before = cache.unshifted[position - 1];
      cache.unshifted[position] = k.map(head => head.slice());
      k.forEach((head, h) => (before ? head.set(before[h].subarray(half), half) : head.fill(0, half)));
    },
  },

  // Bias F_i − F_j, with F the running sum of ln f, f = σ(x w + b) per head (Lin et al. 2025)
  forget: {score: ({gate}, call) => fade(linear(gate, call.x), call, call.cache.forgotten)},

  // The same with one f per head for all tokens
  fade: {score: ({rate}, call) => fade(rate, call, call.cache.faded)},

  // One more key, of value zero and of score b per head
  sink: {score: ({bias}, {nothing}) => nothing.forEach((scores, h) => scores.push(bias[h]))},

  // A sink whose score each token computes, x w per head
  token_sink: {
    score({weight}, {x, nothing}) {
      const own = linear(weight, x);
      nothing.forEach((scores, h) => scores.push(own[h]));
    },
  },

  // y minus tanh(α) of its projection on the token's own value (Zhai 2026)
  xsa: {
    finish({strength}, {y, values}) {
      y.forEach((head, h) => {
        const own = values[h];
        const share = (Math.tanh(strength[h]) * dot(head, own)) / Math.max(dot(own, own), 1e-24);
        head.set(head.map((value, d) => value - share * own[d]));
      });
    },
  },

  // The root mean square of each head's result becomes 1
  out_norm: {
    finish(own, {y}) {
      y.forEach(head => head.set(rmsNorm({weight: new Float32Array(head.length).fill(1)}, head, 1e-6)));
    },
  },

  // y · 2σ(x w), a number per head or per channel, y · softplus(x w) / ln 2 and y · SiLU(x W) (Qiu et al. 2025)
  gate: {finish: ({gate}, {x, y}) => multiply(y, linear(gate, x), gate => 2 * sigmoid(gate))},
  gate_element: {finish: (own, call) => MODIFIERS.gate.finish(own, call)},
  gate_biased: {
    finish({gate, bias}, {x, y}) {
      const D = y[0].length;
      multiply(y, linear(gate, x).map((logit, i) => logit + bias[Math.floor(i / D)]), gate => 2 * sigmoid(gate));
    },
  },
  gate_softplus: {
    finish: ({gate}, {x, y}) => multiply(y, linear(gate, x), logit => softplus(logit) / Math.LN2),
  },
  gate_silu: {finish: ({gate_proj}, {x, y}) => multiply(y, linear(gate_proj, x), silu)},
};

// Add F_i − F_j to the scores, where F is the running sum of ln σ(logit); logits: one per head, of the newest token;
// sums: F of the earlier tokens, to which its own is added.
function fade(logits, {scores, position}, sums) {
  const logSigmoid = logit => Math.min(logit, 0) - Math.log1p(Math.exp(-Math.abs(logit)));
  const before = sums[position - 1];
  const sum = Array.from(logits, (logit, h) => (before?.[h] ?? 0) + logSigmoid(logit));
  sums[position] = sum;
  scores.forEach((head, h) => head.set(head.map((score, s) => score + sum[h] - sums[s][h])));
}

// Multiply the results by gates, one per head or per channel.
function multiply(y, gates, activation) {
  const each = gates.length / y.length;
  y.forEach((head, h) => head.set(head.map((value, d) => value * activation(gates[h * each + (d % each)]))));
}

// A GPT. config: the settings of model/config.py; layers: for each layer the form, shape, window, RoPE and modifiers of
// its attention; weights: tensors by name.
class GPT {
  constructor({config, layers}, weights) {
    this.config = config;
    // The tensor "blocks.0.attention.q_norm.weight" becomes this.blocks[0].attention.q_norm.weight.
    for (const [name, tensor] of Object.entries(weights)) {
      const path = name.split(".");
      const last = path.pop();
      const module = path.reduce((parent, part) => (parent[part] ??= {}), this);
      module[last] = tensor;
    }
    this.lm_head ??= this.token_embedding;
    this.blocks = layers.map((layer, i) => {
      const block = this.blocks[i];
      const modifiers = layer.modifiers.map(name => ({own: block.attention.modifiers?.[name], ...MODIFIERS[name]}));
      return {...block, attention: {...block.attention, ...layer, modifiers}};
    });
  }

  // The names of the heads and MLPs of each layer: [["L1 H1", "L1 H2", "L1 MLP"], …].
  get parts() {
    return this.blocks.map(({attention}, i) => {
      const heads = Array.from({length: attention.heads}, (_, h) => `L${i + 1} H${h + 1}`);
      return [...heads, `L${i + 1} MLP`];
    });
  }

  // An empty cache: the ids so far, and for each layer rows by position, and its parts that are off. These belong to the
  // cache because its later rows depend on them. off: a set of names.
  cache(off = new Set()) {
    const layers = this.parts.map(names => ({
      keys: [], values: [], unshifted: [], forgotten: [], faded: [],
      off: [...names.keys()].filter(h => h < names.length - 1 && off.has(names[h])),
      hasMlp: !off.has(names.at(-1)),
    }));
    return {ids: [], layers};
  }

  // Read one more token. Returns the logits (V) of the next one, the attention weights (S) of the heads of all layers, and
  // the residual stream (C) as embedded, then after each attention and each MLP.
  forward(id, cache) {
    const {n_embd: C, norm_eps, mlp: kind, ngrams, position: positions} = this.config;
    const norm = NORMS[this.config.norm];
    const position = cache.ids.push(id) - 1;
    let x = row(this.token_embedding.weight, id, C);
    if (ngrams) x = add(x, this.embedNgrams(cache.ids));
    if (positions === "learned") x = add(x, row(this.position_embedding.weight, position, C));

    // Each block adds to the residual stream: attention gathers from other tokens, the MLP looks at one.
    const shared = {};
    const streams = [x];
    const heads = this.blocks.flatMap((block, i) => {
      const normed = norm(block.attention_norm, x, norm_eps);
      const {change, weights} = attention(block.attention, normed, position, cache.layers[i], shared);
      x = add(x, change);
      streams.push(x);
      if (cache.layers[i].hasMlp) x = add(x, mlp(block.mlp, norm(block.mlp_norm, x, norm_eps), kind));
      streams.push(x);
      return weights;
    });
    return {logits: this.logits(x), heads, streams};
  }

  // The logits (V) of a residual stream (C); of an earlier one the logit lens (nostalgebraist 2020).
  logits(x) {
    const {norm, norm_eps, logit_softcap: cap} = this.config;
    const logits = linear(this.lm_head, NORMS[norm](this.final_norm, x, norm_eps));
    return cap ? logits.map(logit => cap * Math.tanh(logit / cap)) : logits;
  }

  // The sum of a row for each n, at the hash of the last n ids: model/ngrams.py.
  embedNgrams(ids) {
    const {ngrams, ngram_rows, n_embd} = this.config;
    const rows = ngrams.map((n, table) => {
      let hash = 0n;
      for (let back = 1; back <= n; back++) {
        const id = BigInt((ids.at(-back) ?? -1) + 1);  // 0 is the id before a text
        hash = ((hash ^ id) * 1540483477n) % 2147483647n;
      }
      return row(this.ngrams.tables[table].weight, Number(hash % BigInt(ngram_rows)), n_embd);
    });
    return rows.reduce(add);
  }
}

// float16 bits to numbers: sign, 5 bits of exponent, 10 of fraction (IEEE 754).
function fromFloat16(halves) {
  const table = Array.from({length: 65536}, (_, half) => {
    const sign = half < 32768 ? 1 : -1;
    const exponent = (half >> 10) & 31;
    const fraction = (half & 1023) / 1024;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
  });
  return new Float32Array(halves.length).map((_, i) => table[halves[i]]);
}
