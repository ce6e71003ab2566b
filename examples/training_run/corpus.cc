// SPDX-License-Identifier: Apache-2.0
#include "corpus.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace training {

namespace {
constexpr float kFollows[] = {0.55f, 0.8f, 0.93f, 1};  // cumulative probabilities of the four successors
}

Corpus::Corpus(const Shape& shape, const Routing& routing, int n_ranks, int ranks_per_node, uint64_t seed)
    : shape_(shape), routing_(routing), n_ranks_(n_ranks), ranks_per_node_(ranks_per_node), seed_(seed) {
  double sum = 0;
  for (int e = 0; e < shape.experts; e++) popular_.push_back(sum += std::pow(e + 1, -routing.zipf));
}

void Corpus::sample(uint64_t step, uint64_t number, int32_t* tokens) const {
  Random random(seed_ + step * 100003 + number * 7);
  const size_t n_topics = static_cast<size_t>(n_ranks_), words = shape_.vocabulary / n_topics;
  const size_t drawn = random.next(), topic = (routing_.all_topics ? number : drawn) % n_topics;
  size_t word = random.next() % words;
  for (size_t i = 0; i <= shape_.sample_tokens; i++) {
    tokens[i] = static_cast<int32_t>(topic * words + word);
    const float u = random.unit();
    const auto which = static_cast<size_t>(std::upper_bound(kFollows, kFollows + 3, u) - kFollows);
    word = Random(seed_ + 31 * static_cast<uint64_t>(tokens[i]) + which + 1).next() % words;
  }
}

// Returns an element of a Hadamard matrix. Its rows are orthogonal, so that tokens do not disturb each other's choices.
float Corpus::direction(size_t token, size_t i) const { return std::popcount((token + 1) & i) % 2 == 0 ? 1.0f : -1.0f; }

Floats Corpus::embedding() const {
  Floats m(shape_.vocabulary * shape_.hidden);
  for (size_t i = 0; i < m.size(); i++) m[i] = direction(i / shape_.hidden, i % shape_.hidden);
  return m;
}

std::vector<int32_t> Corpus::choose(size_t layer, size_t token) const {
  Random random(seed_ + 7919 * (layer + 1) + 104729 * (token + 1));
  // Each layer assigns the topics to ranks differently.
  std::vector<int> rank_of(static_cast<size_t>(n_ranks_));
  for (size_t t = 0; t < rank_of.size(); t++) rank_of[t] = static_cast<int>(t);
  Random shuffle(seed_ + 15485863 * (layer + 1));
  for (size_t t = rank_of.size() - 1; t > 0; t--) std::swap(rank_of[t], rank_of[shuffle.next() % (t + 1)]);
  const int rank = rank_of[token / (shape_.vocabulary / rank_of.size())], node = rank / ranks_per_node_;
  const int per_rank = shape_.experts / n_ranks_, per_node = per_rank * ranks_per_node_;
  const auto below = [&](int n) { return static_cast<int>(random.next() % static_cast<uint64_t>(n)); };
  std::vector<int32_t> chosen;
  while (chosen.size() < static_cast<size_t>(shape_.top_k)) {
    const double u = static_cast<double>(random.unit()), v = static_cast<double>(random.unit());
    int e = 0;
    if (u < routing_.on_rank)
      e = rank * per_rank + below(per_rank);
    else if (u < routing_.on_rank + routing_.on_node)
      e = node * per_node + below(per_node);
    else
      e = static_cast<int>(std::upper_bound(popular_.begin(), popular_.end() - 1, v * popular_.back()) -
                           popular_.begin());
    if (std::find(chosen.begin(), chosen.end(), e) == chosen.end()) chosen.push_back(e);
  }
  return chosen;
}

Floats Corpus::popularity() const {
  constexpr double kPart = 0.4;
  Floats bias(static_cast<size_t>(shape_.experts));
  for (size_t e = 0; e < bias.size(); e++)
    bias[e] = static_cast<float>(-kPart * routing_.zipf * std::log(static_cast<double>(e + 1)));
  return bias;
}

Floats Corpus::gate(size_t layer) const {
  Floats m(shape_.hidden * static_cast<size_t>(shape_.experts), 0.0f);
  for (size_t token = 0; token < shape_.vocabulary; token++) {
    float logit = 2;
    for (const int32_t e : choose(layer, token)) {
      for (size_t i = 0; i < shape_.hidden; i++)
        m[i * static_cast<size_t>(shape_.experts) + static_cast<size_t>(e)] +=
            direction(token, i) * logit / static_cast<float>(shape_.hidden);
      logit -= 0.25f;
    }
  }
  return m;
}

}  // namespace training
