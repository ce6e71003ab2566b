// SPDX-License-Identifier: Apache-2.0
#include "tools/postmortem.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ctime>
#include <stdexcept>

namespace tools {
namespace {

using nlohmann::json;

// A rank that began a call no earlier than this before another rank gave it up came too late; it has no other fault.
constexpr double kLate_ms = 50;

std::string ranks_text(const std::vector<uint32_t>& ranks) {
  constexpr size_t kMost = 16;
  const std::vector<uint32_t> shown(ranks.begin(),
                                    ranks.begin() + static_cast<std::ptrdiff_t>(std::min(ranks.size(), kMost)));
  return fmt::format("rank{} {}{}", ranks.size() == 1 ? "" : "s", fmt::join(shown, ", "),
                     ranks.size() > kMost ? fmt::format(" and {} more", ranks.size() - kMost) : "");
}

std::string clock_text(double unix_ms) {
  const auto seconds = static_cast<std::time_t>(unix_ms / 1000);
  std::tm local{};
  localtime_r(&seconds, &local);
  return fmt::format("{:%H:%M:%S}.{:03}", local, static_cast<int>(unix_ms - static_cast<double>(seconds) * 1000));
}

std::string span_text(double ms) {
  return ms < 1000 ? fmt::format("{:.0f} ms", ms) : fmt::format("{:.1f} s", ms / 1000);
}

Call read_call(const json& j, double written_ms) {
  Call c;
  c.sequence = j.at("sequence");
  c.count = j.at("count");
  c.place = j.at(c.sequence == 0 ? "peer" : "root");
  c.op = j.at("op");
  c.type = j.at("type");
  c.reduce = j.at("reduce");
  c.plan = j.at("plan");
  c.state = j.at("state");
  c.began_ms = written_ms - j.at("began_ms_ago").get<double>();
  if (c.state != "running" && j.contains("took_ms")) c.ended_ms = c.began_ms + j.at("took_ms").get<double>();
  return c;
}

Wait read_wait(const json& j) {
  Wait w;
  w.what = j.at("what");
  w.sequence = j.at("sequence");
  w.thread = j.at("thread");
  w.blocked_ms = j.at("blocked_ms");
  w.peers = j.at("for").get<std::vector<uint32_t>>();
  w.n_peers = j.at("for_total");
  if (j.contains("awaits")) w.awaits = j.at("awaits").get<uint32_t>();
  return w;
}

std::vector<Host> read_hosts(const json& all, uint32_t n_ranks) {
  std::vector<Host> hosts;
  for (const json& j : all) {
    Host& h = hosts.emplace_back(Host{j.at("host_id"), j.at("name"), {}, j.value("clock_ahead_ms", 0.0)});
    for (const auto& [first, last] : j.at("ranks").get<std::vector<std::pair<uint32_t, uint32_t>>>()) {
      for (uint64_t r = first; r <= last && r < n_ranks; ++r) h.ranks.push_back(static_cast<uint32_t>(r));
    }
  }
  return hosts;
}

// Only the first of many peers are recorded. A rank beyond them counts when nothing shows that it has begun the call.
std::vector<uint32_t> awaited_by(const Group& g, const Member& m, const Wait& w) {
  std::vector<uint32_t> peers = w.peers;
  if (w.n_peers <= peers.size()) return peers;
  for (uint32_t r = 0; r < g.n_ranks; ++r) {
    const auto found = g.members.find(r);
    const Call* const newest = found != g.members.end() ? found->second.newest() : nullptr;
    const bool begun = newest != nullptr && newest->sequence >= w.sequence;
    if (r != m.rank && !begun && std::find(w.peers.begin(), w.peers.end(), r) == w.peers.end()) peers.push_back(r);
  }
  return peers;
}

}  // namespace

std::string Call::text() const {
  if (sequence == 0) return fmt::format("{} {} rank {} ({} {})", plan, is_send() ? "to" : "from", place, count, type);
  return fmt::format("{} #{} (count {}, {}, {}, root {})", op, sequence, count, type, reduce, place);
}

bool Call::same_call(const Call& o) const {
  return op == o.op && count == o.count && type == o.type && reduce == o.reduce && place == o.place;
}

const Call* Member::newest() const {
  const auto found = std::find_if(calls.rbegin(), calls.rend(), [](const Call& c) { return c.sequence > 0; });
  return found == calls.rend() ? nullptr : &*found;
}

const Call* Member::call(uint64_t sequence) const {
  const auto found = std::find_if(calls.rbegin(), calls.rend(), [&](const Call& c) { return c.sequence == sequence; });
  return found == calls.rend() ? nullptr : &*found;
}

void Member::move_back(double ms) {
  if (failed) failed_ms -= ms;
  written_ms -= ms;
  for (Call& c : calls) {
    c.began_ms -= ms;
    if (c.ended_ms > 0) c.ended_ms -= ms;
  }
}

const Host* Group::host_of(uint32_t rank) const {
  const auto found = std::find_if(hosts.begin(), hosts.end(), [&](const Host& h) {
    return std::find(h.ranks.begin(), h.ranks.end(), rank) != h.ranks.end();
  });
  return found == hosts.end() ? nullptr : &*found;
}

bool Group::says_something(const Host& host) const {
  return std::any_of(host.ranks.begin(), host.ranks.end(), [&](uint32_t r) { return members.count(r) > 0; });
}

std::string Group::title() const {
  return fmt::format("communicator {}{}{}", id.substr(0, 8), name.empty() ? "" : " \"" + name + "\"",
                     memory == "host" ? "" : ", " + memory + " memory");
}

void PostMortem::add(const std::string& text) {
  try {
    const json all = json::parse(text);
    if (all.at("format") != "moeccl-status") throw std::runtime_error("is not what moecclStatus writes");
    if (all.at("version") != 1) throw std::runtime_error("is of another version of MoECCL: use that one's `moeccl`");
    const double written = all.at("written_unix_ms");
    for (const json& j : all.at("communicators")) {
      Member m;
      m.pid = all.at("pid");
      m.host = all.at("host");
      m.host_id = all.at("host_id");
      m.process = fmt::format("{}:{}", m.host_id, m.pid);
      m.rank = j.at("rank");
      m.n_ranks = j.at("n_ranks");
      constexpr uint32_t kMostRanks = 1 << 16;
      if (m.n_ranks > kMostRanks || m.rank >= m.n_ranks)
        throw std::runtime_error(
            fmt::format("names rank {} of {} ranks: a communicator has 1 to {}", m.rank, m.n_ranks, kMostRanks));
      m.written_ms = written;
      m.failed = j.at("state") == "failed";
      if (m.failed) {
        m.code = j.at("code");
        m.failure = j.at("failure");
        m.failed_ms = j.at("failed_unix_ms");
      }
      for (const json& call : j.at("operations")) m.calls.push_back(read_call(call, written));
      for (const json& wait : j.at("waits")) m.waits.push_back(read_wait(wait));
      const std::string id = j.at("group"), memory = j.at("memory");
      auto group = std::find_if(groups_.begin(), groups_.end(),
                                [&](const Group& g) { return g.id == id && g.memory == memory; });
      if (group == groups_.end()) {
        groups_.push_back({id, j.at("name"), memory, m.n_ranks});
        group = groups_.end() - 1;
      }
      if (group->hosts.empty() && j.contains("hosts")) group->hosts = read_hosts(j.at("hosts"), m.n_ranks);
      if (m.n_ranks != group->n_ranks)
        throw std::runtime_error(
            fmt::format("gives {} ranks to the {}, another file {}", m.n_ranks, group->title(), group->n_ranks));
      group->members[m.rank] = std::move(m);
    }
  } catch (const json::exception& e) {
    std::string_view why = e.what();  // "[json.exception.parse_error.101] parse error at line 1, column 1: ..."
    if (why.starts_with('[')) why.remove_prefix(why.find(' ') + 1);
    throw std::runtime_error(fmt::format("is not what moecclStatus writes: {}", why));
  }
}

// Finds the first call of each communicator that two ranks have made differently.
void PostMortem::find_differences(std::vector<std::string>& lines) const {
  for (const Group& g : groups_) {
    std::map<uint64_t, const Member*> first;
    std::map<uint64_t, std::string> found;
    for (const auto& [rank, m] : g.members) {
      for (const Call& c : m.calls) {
        if (c.sequence == 0) continue;
        const auto [at, is_new] = first.emplace(c.sequence, &m);
        const Call& other = *at->second->call(c.sequence);
        if (!is_new && !c.same_call(other))
          found.emplace(c.sequence, fmt::format("{}: rank {} calls {}, rank {} calls {}", g.title(), at->second->rank,
                                                other.text(), rank, c.text()));
      }
    }
    if (!found.empty()) lines.push_back(found.begin()->second);
  }
}

const Host* PostMortem::silent_host(const Group& group, uint32_t rank) const {
  const Host* const host = group.host_of(rank);
  if (host == nullptr) return nullptr;
  for (const Group& g : groups_) {
    for (const Host& h : g.hosts) {
      if (h.id == host->id && g.says_something(h)) return nullptr;
    }
  }
  return host;
}

std::string PostMortem::name_of(const Host& host) const {
  for (const Group& g : groups_) {
    for (const Host& h : g.hosts) {
      if (h.name == host.name && h.id != host.id) return fmt::format("{} (id {})", host.name, host.id);
    }
  }
  return host.name;
}

std::string PostMortem::ranks_of(const Host& host) const {
  std::string text;
  for (const Group& g : groups_) {
    for (const Host& h : g.hosts) {
      if (h.id != host.id) continue;
      text += fmt::format("{}{} of {}", text.empty() ? "" : "; ", ranks_text(h.ranks), g.title());
    }
  }
  return text;
}

std::vector<size_t> PostMortem::waits_of(const Member& member, const Node& waiter) const {
  const bool alone = std::none_of(groups_.begin(), groups_.end(), [&](const Group& g) {
    return std::count_if(g.members.begin(), g.members.end(),
                         [&](const auto& m) { return m.second.process == member.process; }) > 1;
  });
  std::vector<size_t> waits;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& n = nodes_[i];
    if (n.member->process != member.process) continue;
    // Each of several ranks in one process waits only for itself, unless one thread waits for several.
    const bool one_thread = n.member->process == waiter.member->process && n.wait->thread == waiter.wait->thread;
    if (alone || n.member->rank == member.rank || one_thread) waits.push_back(i);
  }
  return waits;
}

void PostMortem::follow(const Node& node, uint32_t rank, std::map<std::string, std::vector<std::string>>& culprits,
                        std::vector<size_t>& next) {
  const Group& g = *node.group;
  const std::string waiter = fmt::format("rank {} waited for it in {}", node.member->rank, node.wait->what);
  const auto found = g.members.find(rank);
  if (found == g.members.end()) {
    if (const Host* const host = silent_host(g, rank); host != nullptr) {
      constexpr const char* kGone =
          "Culprit: host {} is gone, with {}: none of its processes has left anything. If it runs, it was cut off, or "
          "they were stopped or outside of every call";
      constexpr const char* kNotAsked =
          "Not asked: host {}, with {}. Run `moeccl status --json` on each host, and give what they write to `moeccl "
          "postmortem`";
      culprits[fmt::format(fmt::runtime(live_ ? kNotAsked : kGone), name_of(*host), ranks_of(*host))].push_back(waiter);
      return;
    }
    constexpr const char* kLeftNothing =
        "Culprit: rank {} of {} has left nothing: it was outside of every call when the others gave up, it was "
        "stopped, or its process or host is gone";
    constexpr const char* kPidNotGiven = "Not asked: rank {} of {}; give its pid too";
    culprits[fmt::format(fmt::runtime(live_ ? kPidNotGiven : kLeftNothing), rank, g.title())].push_back(waiter);
    return;
  }
  const Member& m = found->second;
  const uint64_t wanted = node.wait->sequence;
  const Call* const newest = m.newest();
  if (wanted > 0) {
    const Call* const made = m.call(wanted);
    if (made != nullptr && node.member->failed && node.member->waited_in_full() &&
        made->began_ms > node.member->failed_ms - kLate_ms) {
      // In another communicator it may itself have waited until then.
      const size_t before = next.size();
      for (const size_t i : waits_of(m, node)) {
        if (nodes_[i].group != &g) next.push_back(i);
      }
      if (next.size() == before)
        culprits[fmt::format("Culprit: rank {} of {} (pid {} on {}) came too late to {}", rank, g.title(), m.pid,
                             m.host, made->text())]
            .push_back(waiter);
      return;
    }
    if (newest != nullptr && newest->sequence >= wanted) return;  // it takes part
  }
  // It is elsewhere: in another call of the same process, or in none.
  const std::vector<size_t> waits = waits_of(m, node);
  for (const size_t i : waits) {
    const Node& other = nodes_[i];
    const bool counterpart =
        wanted == 0 && other.member == &m && other.wait->sequence == 0 &&
        std::find(other.wait->peers.begin(), other.wait->peers.end(), node.member->rank) != other.wait->peers.end();
    if (counterpart && other.wait->what.starts_with("send") != node.wait->what.starts_with("send")) return;
  }
  next.insert(next.end(), waits.begin(), waits.end());
  if (!waits.empty() || !node.member->waited_in_full()) return;
  const std::string last =
      newest == nullptr
          ? "it has made no call"
          : fmt::format("its last call, {}, {} {} ago", newest->text(), newest->state == "done" ? "ended" : "began",
                        span_text(m.written_ms - (newest->ended_ms > 0 ? newest->ended_ms : newest->began_ms)));
  culprits[fmt::format("Culprit: rank {} of {} (pid {} on {}) {}: {}", rank, g.title(), m.pid, m.host,
                       wanted > 0 ? fmt::format("has not made call #{}", wanted) : "is in no call that answers", last)]
      .push_back(waiter);
}

// Returns "" when there is none. Depth first; edges go from a wait to the waits that it waits for.
std::string PostMortem::cycle(const std::vector<std::vector<size_t>>& edges) const {
  std::vector<int> state(edges.size(), 0);
  std::vector<size_t> path;
  std::string text;
  const auto visit = [&](const auto& self, size_t i) -> bool {
    state[i] = 1;
    path.push_back(i);
    for (const size_t j : edges[i]) {
      if (state[j] == 1) {
        const auto from = std::find(path.begin(), path.end(), j);
        for (auto at = from; at != path.end(); ++at) {
          const Node& n = nodes_[*at];
          text += fmt::format("  rank {} of {} (pid {} on {}, thread {}) waits in {}\n", n.member->rank,
                              n.group->title(), n.member->pid, n.member->host, n.wait->thread, n.wait->what);
        }
        return true;
      }
      if (state[j] == 0 && self(self, j)) return true;
    }
    state[i] = 2;
    path.pop_back();
    return false;
  };
  for (size_t i = 0; i < edges.size(); ++i) {
    if (state[i] == 0 && visit(visit, i)) break;
  }
  return text;
}

std::string PostMortem::first_failure() const {
  const Member* first = nullptr;
  const Group* of = nullptr;
  for (const Group& g : groups_) {
    for (const auto& [rank, m] : g.members) {
      if (m.failed && (first == nullptr || m.failed_ms < first->failed_ms)) first = &m, of = &g;
    }
  }
  if (first == nullptr) return {};
  return fmt::format("First failure: rank {} of {} at {}: {} ({})\n", first->rank, of->title(),
                     clock_text(first->failed_ms), first->failure, first->code);
}

// For ranks that have all made the call while none ends it: names the rank that the chain of steps waits for.
std::string PostMortem::stuck_links() const {
  std::string text;
  for (const Node& n : nodes_) {
    if (n.wait->awaits < 0) continue;
    text += fmt::format("  rank {} waits for rank {}: {}\n", n.member->rank, n.wait->awaits, n.wait->what);
  }
  return text;
}

// Each communicator has compared its hosts with its own first one. From the largest, which has met most hosts, one
// clock reaches all communicators that share a host with those that it has reached; what it does not reach has a clock
// of its own.
std::string PostMortem::use_one_clock() {
  std::vector<Group*> by_size;
  for (Group& g : groups_) by_size.push_back(&g);
  std::stable_sort(by_size.begin(), by_size.end(), [](auto* a, auto* b) { return a->hosts.size() > b->hosts.size(); });
  std::map<std::string, double> ahead;
  std::string text;
  const Host* first = nullptr;
  const auto met = [&ahead](const Group* g) {
    return std::find_if(g->hosts.begin(), g->hosts.end(), [&](const Host& h) { return ahead.count(h.id) > 0; });
  };
  while (!by_size.empty()) {
    auto next = std::find_if(by_size.begin(), by_size.end(), [&](const Group* g) { return met(g) != g->hosts.end(); });
    double base = 0;
    if (next != by_size.end()) {
      const auto known = met(*next);
      base = ahead[known->id] - known->clock_ahead_ms;
    } else {
      next = by_size.begin();
      first = (*next)->hosts.empty() ? nullptr : &(*next)->hosts[0];
    }
    for (const Host& h : (*next)->hosts) {
      const auto [at, is_new] = ahead.emplace(h.id, base + h.clock_ahead_ms);
      if (is_new && at->second != 0)
        text += fmt::format("The clock of host {} was {} {} that of host {}, whose time is used here.\n", name_of(h),
                            span_text(std::abs(at->second)), at->second > 0 ? "ahead of" : "behind", name_of(*first));
    }
    by_size.erase(next);
  }
  for (Group& g : groups_) {
    for (auto& [rank, m] : g.members) m.move_back(ahead[m.host_id]);
  }
  return text.empty() ? text : text + "\n";
}

std::string PostMortem::report(bool* found) {
  nodes_.clear();
  std::string text = use_one_clock();
  for (const Group& g : groups_) {
    std::vector<uint32_t> missing;
    for (uint32_t r = 0; r < g.n_ranks; ++r) {
      if (g.members.count(r) == 0) missing.push_back(r);
    }
    text += fmt::format("{}, {} ranks{}\n", g.title(), g.n_ranks,
                        missing.empty() ? "" : fmt::format("; nothing from {}", ranks_text(missing)));
    text += fmt::format("  {:>5} {:>8} {:<16} {:<9} {}\n", "rank", "pid", "host", "state",
                        "last call, and what it waits for");
    for (const auto& [rank, m] : g.members) {
      const Call* const last = m.calls.empty() ? nullptr : &m.calls.back();
      text += fmt::format("  {:>5} {:>8} {:<16} {:<9} {}\n", rank, m.pid, m.host.substr(0, 16),
                          m.failed          ? "failed"
                          : last == nullptr ? "new"
                                            : last->state,
                          last == nullptr ? "none yet" : last->text());
      for (const Wait& w : m.waits) {
        text += fmt::format("  {:>41} {} for {}{}\n", "", span_text(w.blocked_ms), w.what,
                            w.peers.empty() ? ""
                                            : fmt::format(", needs {}{}", ranks_text(w.peers),
                                                          w.n_peers > w.peers.size() ? ", ..." : ""));
        nodes_.push_back({&g, &m, &w});
      }
    }
    text += "\n";
  }
  std::vector<std::string> differences;
  find_differences(differences);
  *found = !differences.empty();
  for (const std::string& line : differences) text += fmt::format("Calls differ in {}.\n", line);

  std::map<std::string, std::vector<std::string>> culprits;
  std::vector<std::vector<size_t>> edges(nodes_.size());
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& n = nodes_[i];
    for (const uint32_t rank : awaited_by(*n.group, *n.member, *n.wait)) follow(n, rank, culprits, edges[i]);
  }
  if (differences.empty()) {
    for (auto& [who, waiters] : culprits) {
      std::sort(waiters.begin(), waiters.end());
      waiters.erase(std::unique(waiters.begin(), waiters.end()), waiters.end());
      constexpr size_t kMost = 4;
      text += who + ".\n";
      for (size_t i = 0; i < std::min(kMost, waiters.size()); ++i) text += fmt::format("  {}\n", waiters[i]);
      if (waiters.size() > kMost) text += fmt::format("  and {} more\n", waiters.size() - kMost);
      *found = *found || who.starts_with("Culprit");
    }
    const std::string circle = cycle(edges);
    if (!circle.empty()) {
      text +=
          "Culprit: each of these waits for the next one, and the last for the first; calls stand in different "
          "orders:\n" +
          circle;
      *found = true;
    }
  }
  text += first_failure();
  if (!*found && culprits.empty() && !nodes_.empty()) {
    const std::string stuck = stuck_links();
    text += "All ranks that are needed have made the same calls; look at what carries their data" +
            (stuck.empty() ? std::string(".\n") : ":\n" + stuck);
  }
  return text;
}

}  // namespace tools
