// SPDX-License-Identifier: Apache-2.0
#include "src/world/reunion.h"

#include <algorithm>
#include <map>
#include <optional>

#include "src/base/env.h"
#include "src/base/hex.h"
#include "src/base/random.h"
#include "src/base/wire.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/messages.h"
#include "src/driver/port.h"
#include "src/driver/process.h"
#include "src/driver/thread.h"

namespace moeccl::comm {
namespace {

constexpr size_t kMaxAddress = 100;
constexpr size_t kNonceBytes = 32;
// Ranks that seem gone are contacted directly before they are skipped, because a connection may break between two live
// ranks. A host that has lost power never answers, so all are asked together, as far as descriptors suffice, and those
// that stay silent are asked again only now and then: a packet to a live rank may have been lost.
constexpr int64_t kAskMs = 200;
constexpr int64_t kAskEveryMs = 100;
constexpr int64_t kAskSilentEveryMs = 1000;
constexpr size_t kAskAtOnce = 256;
constexpr int64_t kFirstPauseUs = 500, kLongestPauseUs = 20'000;

// The part of one rank in a reunion.
class Attendant {
 public:
  Attendant(const MeetingPlaces& places, const ReunionCall& call) : places_(places), call_(call) {}

  Result<Reunion> meet() {
    for (int64_t pause_us = kFirstPauseUs;; pause_us = std::min(pause_us * 2, kLongestPauseUs)) {
      Result<Reunion> met = attempt();
      // A failure while the ranks gather comes from a rank that is now gone or has moved to a lower leader.
      if (met.ok() || met.status().code() != moecclRemoteError || final_) return met;
      if (call_.cancelled) MOECCL_TRY(call_.cancelled());
      if (call_.deadline.passed()) {
        return error(moecclTimeout,
                     "rank {}, which would lead, did not meet the others in time ({}): leave it out by "
                     "name to go on without it",
                     leader_, met.status().message());
      }
      driver::sleep_ns(pause_us * 1000);
    }
  }

 private:
  // Meets at the lowest rank that is present.
  Result<Reunion> attempt() {
    std::vector<uint32_t> lower;  // those that may lead: up to the first that is not gone
    bool expected = false;        // the last of them
    for (uint32_t r = 0; r < places_.rank && !expected; ++r) {
      if (call_.excluded[r]) continue;
      lower.push_back(r);
      expected = !call_.gone(r);
    }
    if (const std::optional<uint32_t> leader = first_that_listens(lower)) {
      leader_ = *leader;
      bootstrap::JoinOptions options;
      if (expected && leader_ == lower.back()) options.others_alive = [this] { return still_expected(leader_); };
      return join(options, nullptr);
    }
    if (expected) {
      leader_ = lower.back();
      return error(moecclRemoteError, "it does not wait for them");
    }
    leader_ = places_.rank;
    bootstrap::RootOptions own;
    own.timeout_ms = std::max<int64_t>(call_.deadline.left_ms(), 1);
    own.key = places_.key;
    own.survivors = true;
    const driver::SocketAddress& place = places_.places[places_.rank];
    if (place.is_unix()) {
      const auto name = place.host_bytes();
      own.unix_name.assign(reinterpret_cast<const char*>(name.data()), name.size());
    } else {
      own.socket_addr = place.str();
      driver::allow_reuse(places_.port);
    }
    MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<bootstrap::Root> root, bootstrap::Root::start(own));
    bootstrap::JoinOptions options;
    options.others_alive = [this] { return nobody_lower(); };
    return join(options, std::move(root));
  }

  Status still_expected(uint32_t rank) const {
    if (!call_.gone(rank)) return {};
    return error(moecclRemoteError, "rank {} is gone", rank);
  }

  // `ranks` ascends.
  std::optional<uint32_t> first_that_listens(std::span<const uint32_t> ranks) {
    std::vector<uint32_t> asked;
    for (const uint32_t r : ranks) {
      const auto silent = silent_.find(r);
      if (silent == silent_.end() || silent->second.passed()) asked.push_back(r);
    }
    for (size_t begin = 0; begin < asked.size(); begin += kAskAtOnce) {
      const auto some = std::span(asked).subspan(begin, std::min(kAskAtOnce, asked.size() - begin));
      std::vector<driver::SocketAddress> at;
      for (const uint32_t r : some) at.push_back(places_.places[r]);
      const std::vector<driver::Answer> answers =
          driver::ask_all(at, Deadline::earlier(call_.deadline, Deadline::after_ms(kAskMs)));
      std::optional<uint32_t> first;
      for (size_t i = 0; i < some.size(); ++i) {
        const bool silent = answers[i] == driver::Answer::kSilent && call_.gone(some[i]);
        if (silent) silent_[some[i]] = Deadline::after_ms(kAskSilentEveryMs);
        if (answers[i] == driver::Answer::kListens && !first) first = some[i];
      }
      if (first) return first;
    }
    return std::nullopt;
  }

  // Called while this rank leads because those below it seem gone.
  Status nobody_lower() {
    if (!ask_again_.passed()) return {};
    ask_again_ = Deadline::after_ms(kAskEveryMs);
    std::vector<uint32_t> lower;
    for (uint32_t r = 0; r < places_.rank; ++r) {
      if (!call_.excluded[r]) lower.push_back(r);
    }
    const std::optional<uint32_t> leads = first_that_listens(lower);
    return leads ? error(moecclRemoteError, "rank {} leads the others", *leads) : Status();
  }

  Result<Reunion> join(bootstrap::JoinOptions& options, std::unique_ptr<bootstrap::Root> root) {
    const auto n = static_cast<uint32_t>(places_.places.size());
    options.gone = [this, n] {
      bootstrap::RankSet gone = call_.excluded;
      for (uint32_t r = 0; r < n; ++r) gone[r] = gone[r] || (r != places_.rank && call_.gone(r));
      return gone;
    };
    options.cancelled = call_.cancelled;
    MOECCL_ASSIGN_OR_RETURN(const moecclUniqueId id, places_.id_of(leader_));
    Reunion met;
    met.root = std::move(root);
    MOECCL_ASSIGN_OR_RETURN(met.session, bootstrap::Session::join(id, static_cast<int>(places_.rank),
                                                                  static_cast<int>(n), call_.deadline, options));
    met.members.assign(met.session->members().begin(), met.session->members().end());
    met.rank = static_cast<uint32_t>(met.session->rank());
    MOECCL_TRY(agree(met));
    return met;
  }

  // Agrees on the ranks that were left out, and on a key that only holders of the old one can derive.
  Status agree(Reunion& met) {
    Writer mine;
    mine.u8(call_.only_excluded);
    mine.bytes(bootstrap::encode_ranks(call_.excluded));
    std::byte nonce[kNonceBytes];
    MOECCL_TRY(random_bytes(nonce, sizeof(nonce)));
    const std::vector<std::byte> terms(mine.view().begin(), mine.view().end());
    mine.raw(nonce);
    MOECCL_ASSIGN_OR_RETURN(const auto words, met.session->all_gather(mine.view(), call_.deadline));
    final_ = true;  // failures from here on are the same on all ranks
    for (size_t i = 0; i < words.size(); ++i) {
      if (words[i].size() == mine.size() && std::equal(terms.begin(), terms.end(), words[i].begin())) continue;
      met.session->close();
      return error(moecclMismatch, "ranks {} and {} leave different ranks out: give the same on all", places_.rank,
                   met.members[i]);
    }
    met.key = bootstrap::derive_key(places_.key,
                                    format("moeccl survivors {}", hex(std::span(words[0]).subspan(terms.size()))));
    if (!call_.only_excluded) return {};
    std::vector<int> others;
    for (uint32_t r = 0; r < places_.places.size(); ++r) {
      const bool here = std::binary_search(met.members.begin(), met.members.end(), r);
      if (!here && !call_.excluded[r]) others.push_back(static_cast<int>(r));
    }
    if (others.empty()) return {};
    met.session->close();
    return error(moecclRemoteError, "{} {} gone too: name them among those to leave out, or name none at all",
                 bootstrap::describe_ranks(others), others.size() == 1 ? "is" : "are");
  }

  const MeetingPlaces& places_;
  const ReunionCall& call_;
  uint32_t leader_ = 0;
  bool final_ = false;
  Deadline ask_again_ = Deadline::after_ms(0);
  std::map<uint32_t, Deadline> silent_;  // ranks that have not answered: when to ask again
};

}  // namespace

Result<MeetingPlaces> MeetingPlaces::arrange(bootstrap::Session& session, const bootstrap::Key& key,
                                             const std::string& address, Deadline deadline) {
  MeetingPlaces made;
  made.rank = static_cast<uint32_t>(session.rank());
  made.key = key;
  made.host_hash = driver::host_identity().hash();
  const size_t n = session.peers().size();
  if (address.empty()) {
    for (size_t r = 0; r < n; ++r) {
      const bootstrap::Key name = bootstrap::derive_key(key, format("moeccl meeting of rank {}", r));
      made.places.push_back(driver::unix_address(format("moeccl-{}", hex(std::span(name).first(12)))));
    }
    return made;
  }
  MOECCL_ASSIGN_OR_RETURN(driver::SocketAddress own, driver::parse_ip_address(address));
  MOECCL_ASSIGN_OR_RETURN(made.port, driver::reserve_port(&own, env().port_range));
  Writer mine;
  mine.string(own.str());
  MOECCL_ASSIGN_OR_RETURN(const auto all, session.all_gather(mine.view(), deadline));
  for (size_t r = 0; r < n; ++r) {
    Reader in(all[r]);
    const std::string text = in.string(kMaxAddress);
    Result<driver::SocketAddress> place = driver::parse_ip_address(text);
    if (!in.done() || !place.ok() || place->port() == 0)
      return error(moecclRemoteError, "rank {} sent no address where survivors could meet", r);
    made.places.push_back(*place);
  }
  return made;
}

Result<moecclUniqueId> MeetingPlaces::id_of(uint32_t r) const {
  bootstrap::UniqueId id;
  id.address = places[r];
  id.key = key;
  id.host_hash = host_hash;
  return bootstrap::encode_unique_id(id);
}

Result<Reunion> meet_again(const MeetingPlaces& places, const ReunionCall& call) {
  return Attendant(places, call).meet();
}

}  // namespace moeccl::comm
