// SPDX-License-Identifier: Apache-2.0
// The routings of a layer. To XLA a routing is a function of the choices and weights: each call gets these arrays, and
// a number that finds the tables which the library made from them. The last used tables stay; for older ones the
// library makes them again, which is a collective. All ranks run the same calls in the same order, so they keep and
// make the same ones. The number alone finds the tables: arrays are not compared, because JAX may compute the weights
// again for a backward pass, and then they can differ in their last bits.
#pragma once

#include <list>

#include "bindings/jax/members.h"

namespace moeccl::jax {

struct LayerShape {
  size_t row_bytes;  // of a token
  size_t top_k;
  size_t room;      // rows of the buffers that dispatch writes
  size_t routings;  // that stay, at least 1
};

// What names a routing in a call.
struct Choices {
  const int32_t* index;  // [tokens][top_k]
  const float* weight;   // [tokens][top_k]
  size_t n_tokens;
  uint64_t number;
};

// Its member's `busy` is held in every call.
class Layer {
 public:
  Layer(std::shared_ptr<Member> member, moecclMoe_t moe, const LayerShape& shape)
      : member(std::move(member)), shape(shape), moe_(moe) {}

  // Destroys the routings. From then on every call fails.
  void close();
  // Makes a routing and its number. The call is collective.
  Outcome make(Choices* choices, moecclRouting_t* routing);
  // Finds a routing or makes it again.
  Outcome find(const Choices& choices, moecclRouting_t* routing);

  const std::shared_ptr<Member> member;
  const LayerShape shape;

 private:
  struct Entry {
    uint64_t number;
    moecclRouting_t routing;
  };
  Outcome update(const Choices& choices, moecclRouting_t* routing);

  moecclMoe_t moe_;
  std::list<Entry> entries_;  // the last used first
};

Numbered<Layer>& layers();

}  // namespace moeccl::jax
