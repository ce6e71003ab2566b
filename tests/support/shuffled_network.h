// SPDX-License-Identifier: Apache-2.0
// A network that keeps no order: a thread delivers each put in pieces, late, and in any order. Its links follow the
// contract of such a network (Capabilities::ordered is false): a signal, or a change of the board, waits until the data
// that it covers has arrived. Posted puts are read in place when they arrive. Ranks are threads of one process.
#pragma once

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "src/base/clock.h"
#include "src/base/wire.h"
#include "transport/transport.h"

namespace moeccl::tests {

class ShuffledNetwork {
 public:
  // A mutation that tests of the contract must find: signals overtake the data that they cover.
  static std::atomic<bool>& signals_wait() {
    static std::atomic<bool> wait{true};
    return wait;
  }
  // Another mutation: sources are reported as free although they are still to be read.
  static std::atomic<bool>& sources_stay() {
    static std::atomic<bool> stay{true};
    return stay;
  }
  static transport::Probe probe() { return {true, "memory of this process, shuffled", {}}; }
  static Result<std::unique_ptr<transport::Endpoint>> open(const transport::NetworkOptions& options) {
    return std::unique_ptr<transport::Endpoint>(std::make_unique<Endpoint>(options));
  }

 private:
  using LocalMemory = transport::LocalMemory;
  using Board = transport::Board;

  // The state that one rank shows to one peer.
  struct News {
    std::mutex mutex;
    std::unique_ptr<Board> board = std::make_unique<Board>();
    transport::BlockWord blocks[2];

    static void copy_word(std::atomic<uint64_t>& to, const std::atomic<uint64_t>& from) {
      to.store(from.load(std::memory_order_relaxed), std::memory_order_relaxed);
    }
    // Works as in transport/tcp, but from memory to memory.
    void show(const LocalMemory& own, uint32_t peer) {
      const std::lock_guard lock(mutex);
      Board& to = *board;
      for (uint32_t e = 0; e < transport::kEntries; ++e) {
        const transport::Entry& from = own.board->entries[e];
        const uint64_t seq = from.seq.load(std::memory_order_acquire);
        if (seq == to.entries[e].seq.load(std::memory_order_relaxed)) continue;
        const transport::BlockWord& block = own.blocks[seq % 2][peer];
        copy_word(blocks[seq % 2].count, block.count);
        copy_word(blocks[seq % 2].displacement, block.displacement);
        copy_word(blocks[seq % 2].expects, block.expects);
        copy_word(to.entries[e].signature, from.signature);
        copy_word(to.entries[e].count, from.count);
        copy_word(to.entries[e].plan, from.plan);
        copy_word(to.entries[e].input, from.input);
        copy_word(to.entries[e].output, from.output);
        copy_word(to.entries[e].max_block, from.max_block);
        copy_word(to.entries[e].history, from.history);
        to.entries[e].seq.store(seq, std::memory_order_release);
      }
      to.progress.completed.store(own.board->progress.completed.load(std::memory_order_acquire),
                                  std::memory_order_release);
      const uint32_t state = own.board->health.state.load(std::memory_order_acquire);
      for (size_t i = 0; i < transport::kFailureText / 8; ++i) copy_word(to.health.text[i], own.board->health.text[i]);
      to.health.code.store(own.board->health.code.load(), std::memory_order_relaxed);
      to.health.state.store(state, std::memory_order_seq_cst);
    }
  };

  struct Piece {
    uint64_t number = 0;
    uint64_t put = 0;  // the posted put that it belongs to; 0: none
    uint64_t offset = 0;
    std::vector<std::byte> bytes;  // the data or, for a posted put, the next two fields
    const std::byte* src = nullptr;
    size_t n_bytes = 0;
    int64_t due_ns = 0;
  };
  struct Signal {
    uint32_t sig = 0;
    uint64_t word = 0;
    uint64_t after = 0;  // no piece with a lower number may still be in flight
  };

  // One direction between two ranks.
  struct Wire {
    std::mutex mutex;
    std::vector<Piece> pieces;  // in flight, in no order
    std::vector<Signal> signals;
    uint64_t posted = 0;  // pieces so far
    bool ended = false;
  };

  class Link final : public transport::Link, private transport::PostedPuts {
   public:
    Link(const LocalMemory& own, uint32_t peer, std::shared_ptr<Wire> out, std::shared_ptr<News> ours,
         std::shared_ptr<News> theirs)
        : own_(own),
          peer_(peer),
          out_(std::move(out)),
          ours_(std::move(ours)),
          theirs_(std::move(theirs)),
          random_(own.rank + 1) {
      parts_.posted_puts = this;
      peer_words_ = {theirs_->board.get(), {&theirs_->blocks[0], &theirs_->blocks[1]}};
    }
    const char* name() const override { return "shuffled"; }
    Result<transport::PutState> put(uint64_t offset, const void* src, size_t bytes) override {
      return take(offset, src, bytes, false);
    }
    Status signal(uint32_t sig, uint32_t number, uint32_t tag) override {
      if (own_.board->health.state.load() != 0) return {};
      ours_->show(own_, peer_);  // before the signal, or with it
      const std::lock_guard lock(out_->mutex);
      out_->signals.push_back({sig, uint64_t{tag} << 32 | number, out_->posted});
      return {};
    }
    Status check_peer() override { return {}; }

   private:
    static constexpr size_t kMostPieces = 64;
    Result<transport::PutState> post(uint64_t offset, const void* src, size_t bytes) override {
      return take(offset, src, bytes, true);
    }
    uint64_t posted() const override { return posted_; }
    bool taken(uint64_t count) const override {
      const std::lock_guard lock(out_->mutex);
      const auto& all = out_->pieces;
      return !sources_stay() ||
             std::none_of(all.begin(), all.end(), [&](const Piece& p) { return p.put != 0 && p.put <= count; });
    }
    bool reads_sources() const override { return !taken(posted_); }
    void withdraw() override {}
    Result<transport::PutState> take(uint64_t offset, const void* src, size_t bytes, bool later) {
      if (own_.board->health.state.load() != 0) return transport::PutState::kDone;
      const std::lock_guard lock(out_->mutex);
      if (out_->pieces.size() > kMostPieces) return transport::PutState::kFull;
      const auto* from = static_cast<const std::byte*>(src);
      for (size_t at = 0; at < bytes;) {
        const size_t n = std::min<size_t>(bytes - at, 1 + random_() % std::max<size_t>(bytes / 2, 64));
        Piece p{out_->posted++, later ? posted_ + 1 : 0, offset + at, {}, from + at, n, now_ns() + late()};
        if (!later) p.bytes.assign(p.src, p.src + n);
        out_->pieces.push_back(std::move(p));
        at += n;
      }
      posted_ += later;
      return transport::PutState::kDone;
    }
    int64_t late() { return static_cast<int64_t>(random_() % 64 == 0 ? random_() % 400'000 : random_() % 20'000); }

    LocalMemory own_;
    uint32_t peer_;
    std::shared_ptr<Wire> out_;
    std::shared_ptr<News> ours_, theirs_;
    uint64_t posted_ = 0;
    std::minstd_rand random_;
  };

  // Delivers incoming data to this rank, and its board to the others.
  class Engine final : public transport::Engine {
   public:
    struct Peer {
      uint32_t rank = 0;
      std::shared_ptr<Wire> in, out;
      std::shared_ptr<News> ours;  // what this peer sees of this rank
    };
    Engine(const LocalMemory& own, std::vector<Peer> peers) : own_(own), peers_(std::move(peers)) {
      thread_ = std::thread([this] { run(); });
    }
    ~Engine() override {
      board_changed(true);
      // Data in flight to others still arrives; data in flight to this rank has no destination any more.
      for (const Deadline d = Deadline::after_ms(1000); !d.passed() && any_out(); std::this_thread::yield()) {
      }
      stop_ = true;
      thread_.join();
      for (Peer& p : peers_) {
        const std::lock_guard lock(p.in->mutex);
        p.in->ended = true;
        p.in->pieces.clear();
        p.in->signals.clear();
      }
    }
    void begin() override {}
    void end() override {}
    void progress(uint32_t) override {}
    void operation(uint32_t, bool) override {}
    void board_changed(bool) override {
      for (Peer& p : peers_) p.ours->show(own_, p.rank);
    }

   private:
    bool any_out() {
      for (Peer& p : peers_) {
        const std::lock_guard lock(p.out->mutex);
        if (!p.out->ended && (!p.out->pieces.empty() || !p.out->signals.empty())) return true;
      }
      return false;
    }
    void deliver(Peer& p) {
      const std::lock_guard lock(p.in->mutex);
      Wire& w = *p.in;
      const int64_t now = now_ns();
      for (size_t i = 0; i < w.pieces.size();) {
        Piece& piece = w.pieces[i];
        if (piece.due_ns > now) {
          ++i;
          continue;
        }
        std::memcpy(own_.staging + piece.offset, piece.put != 0 ? piece.src : piece.bytes.data(), piece.n_bytes);
        if (own_.arrivals != nullptr) (void)own_.arrivals->arrived(p.rank, piece.offset, piece.n_bytes);
        std::swap(piece, w.pieces.back());
        w.pieces.pop_back();
      }
      uint64_t oldest = w.posted;
      for (const Piece& piece : w.pieces) oldest = std::min(oldest, piece.number);
      std::erase_if(w.signals, [&](const Signal& s) {
        if (s.after > oldest && signals_wait()) return false;
        auto& word = own_.signals[size_t{p.rank} * transport::kSigsPerPeer + s.sig].word;
        word.store(s.word, std::memory_order_release);
        return true;
      });
    }
    void run() {
      while (!stop_) {
        board_changed(false);
        for (Peer& p : peers_) deliver(p);
        std::this_thread::yield();
      }
    }

    LocalMemory own_;
    std::vector<Peer> peers_;
    std::atomic<bool> stop_{false};
    std::thread thread_;
  };

  // The ranks of one communicator, by the number that rank 0 offers.
  struct Meeting {
    std::map<std::pair<uint32_t, uint32_t>, std::shared_ptr<Wire>> wires;  // from, to
    std::map<std::pair<uint32_t, uint32_t>, std::shared_ptr<News>> news;   // of, to
    std::shared_ptr<Wire> wire(uint32_t from, uint32_t to) {
      auto& w = wires[{from, to}];
      if (w == nullptr) w = std::make_shared<Wire>();
      return w;
    }
    std::shared_ptr<News> of(uint32_t from, uint32_t to) {
      auto& w = news[{from, to}];
      if (w == nullptr) w = std::make_shared<News>();
      return w;
    }
  };

  struct Meetings {
    std::mutex mutex;
    std::vector<std::shared_ptr<Meeting>> all;
  };
  static Meetings& meetings() {
    static Meetings all;
    return all;
  }

  class Endpoint final : public transport::Endpoint {
   public:
    explicit Endpoint(const transport::NetworkOptions& options) : options_(options) {}
    Result<std::vector<std::byte>> offer() override {
      const std::lock_guard lock(meetings().mutex);
      const uint64_t number = meetings().all.size();
      meetings().all.push_back(std::make_shared<Meeting>());
      const auto bytes = as_bytes_of(number);
      return std::vector<std::byte>(bytes.begin(), bytes.end());
    }
    Result<transport::NetworkLinks> connect(const LocalMemory& own, std::span<const transport::Region>,
                                            std::span<const std::vector<std::byte>> offers) override {
      uint64_t number = 0;
      if (offers[0].size() != sizeof(number)) return error(moecclRemoteError, "rank 0 has no shuffled network");
      std::memcpy(&number, offers[0].data(), sizeof(number));
      const std::unique_lock lock(meetings().mutex);
      const std::shared_ptr<Meeting> meeting = meetings().all.at(number);
      transport::NetworkLinks made;
      made.links.resize(options_.n_ranks());
      std::vector<Engine::Peer> peers;
      for (uint32_t r = 0; r < options_.n_ranks(); ++r) {
        if (!options_.remote(r)) continue;
        made.links[r] = std::make_unique<Link>(own, r, meeting->wire(own.rank, r), meeting->of(own.rank, r),
                                               meeting->of(r, own.rank));
        peers.push_back({r, meeting->wire(r, own.rank), meeting->wire(own.rank, r), meeting->of(own.rank, r)});
      }
      made.engine = std::make_unique<Engine>(own, std::move(peers));
      made.alpha_ns = 20'000;
      made.bytes_per_ns = 1;
      return made;
    }

   private:
    transport::NetworkOptions options_;
  };
};

inline constexpr transport::Network kShuffledNetwork = {
    "shuffled", {.ordered = false, .needs_pump = true}, ShuffledNetwork::probe, ShuffledNetwork::open};

}  // namespace moeccl::tests
