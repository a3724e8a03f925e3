// A GPT in plain JavaScript: model/gpt.py and model/attention/layer.py for one token at a time, with a KV cache.
//
// Read GPT.forward, then attention. A vector is a Float32Array, and a matrix W (N, C) one with its rows one after the
// other. C is the width of the residual stream, V the size of the vocabulary, D the channels of a head, H the number of
// query heads and Hkv that of key/value heads; a token stands at `position` and sees S = position + 1 keys.

// Σ a[i + n] b[j + n] over N channels.
function dot(a, i, b, j, N) {
  let sum = 0;
  for (let n = 0; n < N; n++) sum += a[i + n] * b[j + n];
  return sum;
}

// W x + b: (C) -> (N)
function linear({weight, bias}, x) {
  const C = x.length;
  const N = weight.length / C;
  const y = new Float32Array(N);
  // Four rows at a time: a processor can add to one sum before it is done with another.
  let n = 0;
  for (; n + 3 < N; n += 4) {
    const row = n * C;
    let first = 0;
    let second = 0;
    let third = 0;
    let fourth = 0;
    for (let c = 0; c < C; c++) {
      first += weight[row + c] * x[c];
      second += weight[row + C + c] * x[c];
      third += weight[row + 2 * C + c] * x[c];
      fourth += weight[row + 3 * C + c] * x[c];
    }
    y[n] = first;
    y[n + 1] = second;
    y[n + 2] = third;
    y[n + 3] = fourth;
  }
  for (; n < N; n++) y[n] = dot(weight, n * C, x, 0, C);
  return bias ? add(y, bias) : y;
}

// x w / √(mean(x²) + ε) (Zhang & Sennrich 2019)
function rmsNorm({weight}, x, eps) {
  const scale = 1 / Math.sqrt(dot(x, 0, x, 0, x.length) / x.length + eps);
  return x.map((value, c) => value * scale * weight[c]);
}

// (x − mean) w / √(variance + ε) + b (Ba et al. 2016)
function layerNorm({weight, bias}, x, eps) {
  const mean = x.reduce((sum, value) => sum + value, 0) / x.length;
  const centred = x.map(value => value - mean);
  return rmsNorm({weight}, centred, eps).map((value, c) => value + (bias ? bias[c] : 0));
}

const add = (x, y) => x.map((value, c) => value + y[c]);
const sigmoid = x => 1 / (1 + Math.exp(-x));
const silu = x => x * sigmoid(x);

// The error function, to 1.5e-7 (Abramowitz & Stegun 1964, 7.1.26).
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const series = [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592];
  return Math.sign(x) * (1 - series.reduce((sum, factor) => (sum + factor) * t, 0) * Math.exp(-x * x));
}

const ACTIVATIONS = {
  relu2: x => Math.max(0, x) ** 2,
  gelu: x => (x * (1 + erf(x / Math.SQRT2))) / 2,
  gelu_tanh: x => (x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)))) / 2,
};

// The feed-forward network of a block: up, activation, down. SwiGLU (Shazeer 2020) multiplies by a gate instead.
function mlp(layer, x, kind) {
  if (kind !== "swiglu") return linear(layer.down_proj, linear(layer.up_proj, x).map(ACTIVATIONS[kind]));
  const both = linear(layer.gate_up_proj, x);  // (C) -> (2 · inner)
  const gate = both.subarray(0, both.length / 2);
  const up = both.subarray(both.length / 2);
  return linear(
    layer.down_proj,
    up.map((value, i) => silu(gate[i]) * value),
  );
}

// Normalise each head's D channels, in place.
function normalizeHeads(norm, heads, D) {
  for (let i = 0; i < heads.length; i += D) heads.set(rmsNorm(norm, heads.subarray(i, i + D), 1e-6), i);
}

// RoPE (Su et al. 2021): each pair of channels turns by an angle that grows with the position, in place.
function rotate(heads, D, position, {frequencies, length}) {
  for (let head = 0; head < heads.length; head += D) {
    frequencies.forEach((frequency, pair) => {
      const angle = position * frequency;
      const cos = length * Math.cos(angle);
      const sin = length * Math.sin(angle);
      const i = head + 2 * pair;
      const [a, b] = [heads[i], heads[i + 1]];
      heads[i] = a * cos - b * sin;
      heads[i + 1] = a * sin + b * cos;
    });
  }
}

const largest = values => values.reduce((a, b) => Math.max(a, b));

// Scores to weights that sum to 1, in place: softmax. `nothing` are scores of keys without a value: what they take goes
// nowhere.
function softmax(scores, nothing) {
  const most = Math.max(largest(scores), ...nothing);  // exp of less than that does not overflow
  let total = nothing.reduce((sum, score) => sum + Math.exp(score - most), 0);
  for (let s = 0; s < scores.length; s++) {
    scores[s] = Math.exp(scores[s] - most);
    total += scores[s];
  }
  for (let s = 0; s < scores.length; s++) scores[s] /= total;
}

// Attention of one layer (Vaswani et al. 2017): the token at `position` gathers from the tokens before it, and itself.
// cache: keys and values of this layer; shared: values that layers hand to later ones. Returns a change to the residual
// stream (C), and the weights (H, S).
function attention(layer, x, position, cache, shared) {
  const {heads: H, kv_heads: Hkv, head_dim: D, modifiers} = layer;
  const S = position + 1;
  const group = H / Hkv;  // query heads that share a key head

  // Project: one product for the queries, keys and values of all heads, (C) -> ((H + 2 Hkv) · D).
  const projected = linear(layer.qkv_proj, x);
  const q = projected.subarray(0, H * D);
  const k = projected.subarray(H * D, (H + Hkv) * D);
  const v = projected.subarray((H + Hkv) * D);
  if (layer.q_norm) {
    normalizeHeads(layer.q_norm, q, D);
    normalizeHeads(layer.k_norm, k, D);
  }

  // Mix: modifiers of keys and values act before positions enter.
  const call = {x, k, v, position, cache, shared, H, S, D, group};
  for (const {mix, own} of modifiers) mix?.(own, call);

  // Rotate queries and keys: their products then depend on the distance.
  if (layer.rope) {
    rotate(q, D, position, layer.rope);
    rotate(k, D, position, layer.rope);
  }

  // Remember: the cache takes the new key and value, and has those of all S positions.
  cache.keys.set(k, position * Hkv * D);
  cache.values.set(v, position * Hkv * D);

  // See: a score for each query head and each key in reach, q · k / √D.
  call.scores = new Float32Array(H * S).fill(-Infinity);
  call.nothing = Array.from({length: H}, () => (layer.form === "softmax1" ? [0] : []));
  const first = Math.max(0, S - (layer.window ?? S));
  for (let h = 0; h < H; h++) {
    for (let s = first; s < S; s++) {
      const key = (s * Hkv + Math.floor(h / group)) * D;
      const distance = layer.slopes ? layer.slopes[h] * (position - s) : 0;  // ALiBi (Press et al. 2022)
      call.scores[h * S + s] = dot(q, h * D, cache.keys, key, D) / Math.sqrt(D) - distance;
    }
  }
  for (const {score, own} of modifiers) score?.(own, call);

  // Attend: the mean of the values, by weight.
  call.y = new Float32Array(H * D);
  for (let h = 0; h < H; h++) {
    const weights = call.scores.subarray(h * S, (h + 1) * S);
    softmax(weights, call.nothing[h]);
    for (let s = first; s < S; s++) {
      const value = (s * Hkv + Math.floor(h / group)) * D;
      for (let d = 0; d < D; d++) call.y[h * D + d] += weights[s] * cache.values[value + d];
    }
  }

  // Finish: modifiers of each head's result.
  for (const {finish, own} of modifiers) finish?.(own, call);

  // Merge the heads, (H · D) -> (C).
  return {change: linear(layer.o_proj, call.y), weights: call.scores};
}

// Changes to a layer, as in model/attention/modifiers.py, each in place. own: the weights of the modifier.
const MODIFIERS = {
  // v ← λ₁ v + λ₂ v₁, with v₁ the values of the first layer that has this modifier (Zhou et al. 2024)
  value_residual: {
    mix({mixture: [own, first]}, {v, shared}) {
      shared.values ??= v.slice();
      v.forEach((value, i) => (v[i] = own * value + first * shared.values[i]));
    },
  },

  // The later half of a key's channels is the previous token's.
  key_offset: {
    mix(own, {k, D, position, cache}) {
      cache.unshifted ??= new Float32Array(cache.keys.length);
      cache.unshifted.set(k, position * k.length);
      const before = (position - 1) * k.length;
      for (let i = 0; i < k.length; i++) {
        if (i % D >= Math.floor(D / 2)) k[i] = position ? cache.unshifted[before + i] : 0;
      }
    },
  },

  // Bias F_i − F_j, with F the running sum of ln f, f = σ(x w + b) per head (Lin et al. 2025)
  forget: {score: ({gate}, call) => fade(linear(gate, call.x), call)},

  // The same with one f per head for all tokens
  fade: {score: ({rate}, call) => fade(rate, call)},

  // One more key, of value zero and of score b per head
  sink: {score: ({bias}, {nothing}) => nothing.forEach((scores, h) => scores.push(bias[h]))},

  // y minus tanh(α) of its projection on the token's own value (Zhai 2026)
  xsa: {
    finish({strength}, {y, v, H, D, group}) {
      for (let h = 0; h < H; h++) {
        const own = Math.floor(h / group) * D;
        const length = Math.max(dot(v, own, v, own, D), 1e-24);
        const share = (Math.tanh(strength[h]) * dot(y, h * D, v, own, D)) / length;
        for (let d = 0; d < D; d++) y[h * D + d] -= share * v[own + d];
      }
    },
  },

  // y · 2σ(x w), a number per head or per channel, and y · SiLU(x W) (Qiu et al. 2025)
  gate: {finish: ({gate}, {x, y, D}) => multiply(y, D, linear(gate, x), gate => 2 * sigmoid(gate))},
  gate_element: {finish: ({gate}, {x, y}) => multiply(y, 1, linear(gate, x), gate => 2 * sigmoid(gate))},
  gate_silu: {finish: ({gate_proj}, {x, y}) => multiply(y, 1, linear(gate_proj, x), silu)},
};

// Add F_i − F_j to the scores, where F is the running sum of ln σ(logit); logits: one per head, of the newest token.
function fade(logits, {scores, position, cache, H, S}) {
  cache.faded ??= new Float64Array(cache.size * H);
  const rows = cache.faded;  // F of every position and head
  for (let h = 0; h < H; h++) {
    const logSigmoid = Math.min(logits[h], 0) - Math.log1p(Math.exp(-Math.abs(logits[h])));
    const sum = logSigmoid + (position ? rows[(position - 1) * H + h] : 0);
    rows[position * H + h] = sum;
    for (let s = 0; s < S; s++) scores[h * S + s] += sum - rows[s * H + h];
  }
}

// Multiply y by gates, each for `width` channels.
function multiply(y, width, gates, activation) {
  const factors = gates.map(activation);
  y.forEach((value, i) => (y[i] = value * factors[Math.floor(i / width)]));
}

// A GPT and its weights. config: the settings of model/config.py; layers: for each layer the form, shape, window, RoPE
// and modifiers of its attention; weights: tensors by name.
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

  // A cache for `size` positions: the ids so far, and keys and values of each layer, (size, Hkv · D).
  cache(size) {
    const rows = ({attention: {kv_heads, head_dim}}) => new Float32Array(size * kv_heads * head_dim);
    return {ids: [], layers: this.blocks.map(block => ({size, keys: rows(block), values: rows(block)}))};
  }

  // Read one more token. Returns the logits (V) of the next one, and the attention weights (H, S) of each layer.
  forward(id, cache) {
    const {config, blocks} = this;
    const {norm_eps, mlp: kind, logit_softcap: cap} = config;
    const norm = config.norm === "rmsnorm" ? rmsNorm : layerNorm;
    const position = cache.ids.push(id) - 1;
    let x = row(this.token_embedding, id, config.n_embd);
    if (config.ngrams) x = add(x, this.ngramRows(cache.ids));
    if (config.position === "learned") x = add(x, row(this.position_embedding, position, config.n_embd));

    // Each block adds to the residual stream: attention moves between tokens, the MLP works on each by itself.
    const shared = {};
    const heads = blocks.map((block, i) => {
      const normed = norm(block.attention_norm, x, norm_eps);
      const {change, weights} = attention(block.attention, normed, position, cache.layers[i], shared);
      x = add(x, change);
      x = add(x, mlp(block.mlp, norm(block.mlp_norm, x, norm_eps), kind));
      return weights;
    });

    const logits = linear(this.lm_head, norm(this.final_norm, x, norm_eps));
    return {logits: cap ? logits.map(logit => cap * Math.tanh(logit / cap)) : logits, heads};
  }

  // For each n the row of a table at the hash of the last n ids, summed: model/ngrams.py.
  ngramRows(ids) {
    const {ngrams, ngram_rows, n_embd} = this.config;
    let sum = new Float32Array(n_embd);
    ngrams.forEach((n, table) => {
      let hash = 0n;
      for (let back = 1; back <= n; back++) {
        const id = BigInt((ids.at(-back) ?? -1) + 1);  // 0 is the id before a text
        hash = ((hash ^ id) * 1540483477n) % 2147483647n;
      }
      sum = add(sum, row(this.ngrams.tables[table], Number(hash % BigInt(ngram_rows)), n_embd));
    });
    return sum;
  }
}

const row = ({weight}, i, C) => weight.subarray(i * C, (i + 1) * C);

// float16 bits to numbers: sign, 5 bits of exponent, 10 of fraction (IEEE 754).
function fromFloat16(halves) {
  const table = Float32Array.from({length: 65536}, (_, half) => {
    const sign = half < 32768 ? 1 : -1;
    const exponent = (half >> 10) & 31;
    const fraction = (half & 1023) / 1024;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
  });
  const values = new Float32Array(halves.length);
  for (let i = 0; i < values.length; i++) values[i] = table[halves[i]];
  return values;
}
