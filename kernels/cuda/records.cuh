// SPDX-License-Identifier: Apache-2.0
// A rank's own choices on the device: canonical order, capacity, rows on every level's links, and records for the
// peers. See route_args.h. The result does not depend on the order in which blocks or threads run.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/route_args.h"
#include "kernels/cuda/scan.cuh"

namespace moeccl::cuda {

// One thread handles each choice: its place is the number of the token's choices that precede it.
MOECCL_DEVICE void route_order(const RouteOrderKernelArgs& a) {
  const Team team = whole_grid();
  const size_t n = static_cast<size_t>(a.n_tokens) * a.top_k;
  for (size_t i = team.thread; i < n; i += team.n_threads) {
    const auto token = static_cast<uint32_t>(i / a.top_k), k = static_cast<uint32_t>(i % a.top_k);
    const int32_t* choice = a.topk + static_cast<size_t>(token) * a.top_k;
    const bool none = static_cast<uint32_t>(choice[k]) >= a.n_experts;
    if (none && choice[k] != -1) atomic_min(a.bad, token);
    const uint32_t position = none ? kNoChoice : a.position[choice[k]];
    uint32_t place = 0;
    for (uint32_t other = 0; other < a.top_k; ++other) {
      if (other == k) continue;
      const auto expert = static_cast<uint32_t>(choice[other]);
      const uint32_t there = expert < a.n_experts ? a.position[expert] : kNoChoice;
      if (there == position && !none) atomic_min(a.bad, token);
      place += there < position || (there == position && other < k) ? 1 : 0;
    }
    a.key[static_cast<size_t>(token) * a.top_k + place] = none ? kNoChoice : position * kRouteChoices + k;
  }
}

// Threads of other experts may read a token's key while it is dropped: old or new, its value does not concern them.
MOECCL_DEVICE void route_drop(const RouteDropKernelArgs& a) {
  for (uint32_t e = block_index(); e < a.n_experts; e += grid_blocks()) {
    const uint32_t end = a.first[e + 1];
    const uint32_t begin = end - a.first[e] > a.capacity ? a.first[e] + a.capacity : end;
    if (thread_index() == 0) a.drop_counts[e] = static_cast<int32_t>(end - begin);
    for (uint32_t i = begin + thread_index(); i < end; i += block_threads()) {
      uint32_t* key = a.key + static_cast<size_t>(a.list[i]) * a.top_k;
      for (uint32_t k = 0; k < a.top_k; ++k) {
        const uint32_t seen = load_relaxed_device(&key[k]);
        if (seen != kNoChoice && seen / kRouteChoices == a.position[e]) store_relaxed_device(&key[k], kNoChoice);
      }
    }
  }
}

MOECCL_DEVICE void route_levels(const RouteLevelsKernelArgs& a) {
  MOECCL_SHARED uint32_t rows[kLevelSlots];
  for (uint32_t s = thread_index(); s < kLevelSlots; s += block_threads()) rows[s] = 0;
  block_sync();
  const Team team = whole_grid();
  const RouteWays& w = a.ways;
  for (size_t token = team.thread; token < a.n_tokens; token += team.n_threads) {
    const uint32_t* key = a.key + token * a.top_k;
    uint32_t before = 0, before_end = 0;  // the way of the previous choice
    for (uint32_t k = 0; k < a.top_k; ++k) {
      if (key[k] == kNoChoice) continue;
      const uint32_t owner = w.owner[key[k] / kRouteChoices];
      const uint32_t first = w.way_first[owner], end = w.way_first[owner + 1];
      uint32_t hop = first;
      for (uint32_t b = before; a.dedup != 0 && hop < end && b < before_end && w.way_to[hop] == w.way_to[b]; ++b) ++hop;
      for (; hop < end; ++hop) {
        const uint32_t slot = w.way_slot[hop];
        atomic_add(slot < kLevelSlots ? &rows[slot] : &a.rows[slot], 1);
      }
      before = first;
      before_end = end;
    }
  }
  block_sync();
  for (uint32_t s = thread_index(); s < kLevelSlots && s < a.n_slots; s += block_threads())
    if (rows[s] > 0) atomic_add(&a.rows[s], rows[s]);
}

// Returns true if choices of an owner's experts pass through `peer`; sets *last if they end there.
MOECCL_DEVICE bool route_passes(const RouteWays& w, uint32_t owner, uint32_t peer, bool* last) {
  const uint32_t end = w.way_first[owner + 1];
  for (uint32_t hop = w.way_first[owner]; hop < end; ++hop) {
    if (w.way_to[hop] != peer) continue;
    *last = hop + 1 == end;
    return true;
  }
  return false;
}

// Returns what a token adds to the message for `peer`; peer n_ranks is this rank's own list.
MOECCL_DEVICE RouteTotals route_share(const RouteRecordsKernelArgs& a, uint32_t token, uint32_t peer) {
  RouteTotals s{};
  if (token >= a.n_tokens) return s;
  const uint32_t* key = a.key + static_cast<size_t>(token) * a.top_k;
  for (uint32_t k = 0; k < a.top_k; ++k) {
    if (key[k] == kNoChoice) continue;
    bool last = true;
    if (peer < a.n_ranks && !route_passes(a.ways, a.ways.owner[key[k] / kRouteChoices], peer, &last)) continue;
    ++s.choices;
    s.weights += last && a.weight != nullptr ? 1 : 0;
  }
  s.records = s.choices > 0 ? 1 : 0;
  return s;
}

// One warp handles each tile and peer.
MOECCL_DEVICE void route_records_count(const RouteRecordsKernelArgs& a) {
  const Team team = whole_grid();
  const uint32_t n_peers = a.n_ranks + 1;
  const size_t n = static_cast<size_t>(a.n_tiles) * n_peers;
  for (size_t piece = team.warp(); piece < n; piece += team.n_warps()) {
    const auto tile = static_cast<uint32_t>(piece / n_peers), peer = static_cast<uint32_t>(piece % n_peers);
    RouteTotals sum{};
    for (uint32_t i = team.lane(); i < kRecordTile; i += kWarp) {
      const RouteTotals s = route_share(a, tile * kRecordTile + i, peer);
      sum.records += s.records;
      sum.choices += s.choices;
      sum.weights += s.weights;
    }
    for (uint32_t step = kWarp / 2; step > 0; step /= 2) {
      sum.records += shuffle_xor(sum.records, step);
      sum.choices += shuffle_xor(sum.choices, step);
      sum.weights += shuffle_xor(sum.weights, step);
    }
    if (team.lane() == 0) a.tile[piece] = sum;
  }
}

struct RouteMessage {
  uint32_t token, n_experts, expert, weight, end;  // words from the start of the message
};
// The same as layout_of() in src/routing/routing.cc: a header of four words, then the lists.
MOECCL_DEVICE RouteMessage route_message(const RouteTotals& t) {
  RouteMessage m{};
  if (t.records == 0) return m;
  m.token = 4;
  m.n_experts = m.token + t.records;
  m.expert = m.n_experts + (t.records + 3) / 4;
  m.weight = m.expert + (t.choices + 1) / 2;
  m.end = m.weight + t.weights;
  return m;
}

// Runs in one block: sums over the tiles of each peer, then places the messages one after another.
MOECCL_DEVICE void route_records_scan(const RouteRecordsKernelArgs& a) {
  MOECCL_SHARED uint32_t sums[kBlockThreads];
  const uint32_t t = thread_index(), n = block_threads(), n_peers = a.n_ranks + 1;
  uint32_t before = 0;
  for (uint32_t base = 0; base < n_peers; base += n) {
    const uint32_t peer = base + t;
    RouteTotals running{};
    for (uint32_t tile = 0; peer < n_peers && tile < a.n_tiles; ++tile) {
      RouteTotals& cell = a.tile[static_cast<size_t>(tile) * n_peers + peer];
      const RouteTotals here = cell;
      cell = running;
      running.records += here.records;
      running.choices += here.choices;
      running.weights += here.weights;
    }
    const uint32_t own = peer < a.n_ranks ? route_message(running).end : 0;
    block_prefix(sums, own);
    running.first_word = before + sums[t] - own;
    if (peer < n_peers) a.total[peer] = running;
    before += sums[n - 1];
    block_sync();
  }
}

// `at` holds the totals before this token in its list.
MOECCL_DEVICE void route_write_own(const RouteRecordsKernelArgs& a, uint32_t token, const RouteTotals& share,
                                   RouteTotals at) {
  const uint32_t* key = a.key + static_cast<size_t>(token) * a.top_k;
  a.own_n_experts[token] = static_cast<uint8_t>(share.choices);
  for (uint32_t k = 0; k < a.top_k; ++k) {
    if (key[k] == kNoChoice) continue;
    const size_t choice = static_cast<size_t>(token) * a.top_k + key[k] % kRouteChoices;
    a.own_expert[at.choices] = static_cast<uint16_t>(a.expert[key[k] / kRouteChoices]);
    a.own_choice[at.choices] = static_cast<uint32_t>(choice);
    if (a.weight != nullptr) a.own_weight[at.choices] = a.weight[choice];
    ++at.choices;
  }
}

MOECCL_DEVICE void route_write_record(const RouteRecordsKernelArgs& a, uint32_t token, uint32_t peer,
                                      const RouteTotals& share, RouteTotals at) {
  const uint32_t* key = a.key + static_cast<size_t>(token) * a.top_k;
  const RouteMessage m = route_message(a.total[peer]);
  uint32_t* message = a.words + a.total[peer].first_word;
  auto* n_experts = reinterpret_cast<uint8_t*>(message + m.n_experts);
  auto* expert = reinterpret_cast<uint16_t*>(message + m.expert);
  auto* weight = reinterpret_cast<float*>(message + m.weight);
  message[m.token + at.records] = token;
  n_experts[at.records] = static_cast<uint8_t>(share.choices);
  for (uint32_t k = 0; k < a.top_k; ++k) {
    bool last = false;
    if (key[k] == kNoChoice) continue;
    if (!route_passes(a.ways, a.ways.owner[key[k] / kRouteChoices], peer, &last)) continue;
    expert[at.choices++] = static_cast<uint16_t>(a.expert[key[k] / kRouteChoices]);
    if (last && a.weight != nullptr)
      weight[at.weights++] = a.weight[static_cast<size_t>(token) * a.top_k + key[k] % kRouteChoices];
  }
}

// Writes the header, and zeros where lists end within a word.
MOECCL_DEVICE void route_write_header(const RouteRecordsKernelArgs& a, uint32_t peer) {
  const RouteTotals& t = a.total[peer];
  const RouteMessage m = route_message(t);
  if (t.records == 0) return;
  uint32_t* message = a.words + t.first_word;
  message[0] = t.records;
  message[1] = t.choices;
  message[2] = t.weights;
  message[3] = 0;
  auto* n_experts = reinterpret_cast<uint8_t*>(message + m.n_experts);
  for (uint32_t i = t.records; i % 4 != 0; ++i) n_experts[i] = 0;
  if (t.choices % 2 != 0) reinterpret_cast<uint16_t*>(message + m.expert)[t.choices] = 0;
}

MOECCL_DEVICE void route_records_fill(const RouteRecordsKernelArgs& a) {
  const Team team = whole_grid();
  const uint32_t n_peers = a.n_ranks + 1, lane = team.lane();
  const size_t n = static_cast<size_t>(a.n_tiles) * n_peers;
  for (size_t piece = team.warp(); piece < n; piece += team.n_warps()) {
    const auto tile = static_cast<uint32_t>(piece / n_peers), peer = static_cast<uint32_t>(piece % n_peers);
    RouteTotals running = a.tile[piece];
    if (tile == 0 && lane == 0 && peer < a.n_ranks) route_write_header(a, peer);
    for (uint32_t i = lane; i < kRecordTile; i += kWarp) {
      const uint32_t token = tile * kRecordTile + i;
      const RouteTotals share = route_share(a, token, peer);
      RouteTotals upto{};
      upto.records = warp_prefix(share.records, lane);
      upto.choices = warp_prefix(share.choices, lane);
      upto.weights = warp_prefix(share.weights, lane);
      RouteTotals at = running;
      at.records += upto.records - share.records;
      at.choices += upto.choices - share.choices;
      at.weights += upto.weights - share.weights;
      if (peer < a.n_ranks) {
        if (share.records > 0) route_write_record(a, token, peer, share, at);
      } else if (token < a.n_tokens) {
        route_write_own(a, token, share, at);
      }
      running.records += shuffle(upto.records, kWarp - 1);
      running.choices += shuffle(upto.choices, kWarp - 1);
      running.weights += shuffle(upto.weights, kWarp - 1);
    }
  }
}

}  // namespace moeccl::cuda
