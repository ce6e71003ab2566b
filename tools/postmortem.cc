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

// A rank that comes to a call after another one has given it up came too late, not for another reason.
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
  if (j.contains("awaits")) w.awaits = j.at("awaits").get<uint32_t>();
  return w;
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
      m.process = fmt::format("{}:{}", all.at("host_id").get<std::string>(), m.pid);
      m.rank = j.at("rank");
      m.n_ranks = j.at("n_ranks");
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
        groups_.push_back({id, j.at("name"), memory, m.n_ranks, {}});
        group = groups_.end() - 1;
      }
      group->members[m.rank] = std::move(m);
    }
  } catch (const json::exception& e) {
    throw std::runtime_error(fmt::format("is not what moecclStatus writes: {}", e.what()));
  }
}

// The first call of a communicator that two ranks have made differently.
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

void PostMortem::follow(const Node& node, uint32_t rank, std::map<std::string, std::vector<std::string>>& culprits,
                        std::vector<size_t>& next) {
  const Group& g = *node.group;
  const std::string waiter = fmt::format("rank {} waited for it in {}", node.member->rank, node.wait->what);
  const auto found = g.members.find(rank);
  if (found == g.members.end()) {
    culprits[fmt::format("rank {} of {} has left nothing: it was outside of every call when the others gave up, it was "
                         "stopped, or its process or host is gone",
                         rank, g.title())]
        .push_back(waiter);
    return;
  }
  const Member& m = found->second;
  const uint64_t wanted = node.wait->sequence;
  const Call* const newest = m.newest();
  if (wanted > 0) {
    const Call* const made = m.call(wanted);
    if (made != nullptr && node.member->failed && made->began_ms > node.member->failed_ms - kLate_ms) {
      culprits[fmt::format("rank {} of {} (pid {} on {}) came too late to {}", rank, g.title(), m.pid, m.host,
                           made->text())]
          .push_back(waiter);
      return;
    }
    if (newest != nullptr && newest->sequence >= wanted) return;  // it takes part
  }
  // It is elsewhere: in another call of the same process, or in none.
  size_t before = next.size();
  bool takes_part = false;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& other = nodes_[i];
    if (other.member->process != m.process) continue;
    const bool counterpart =
        wanted == 0 && other.member == &m && other.wait->sequence == 0 &&
        std::find(other.wait->peers.begin(), other.wait->peers.end(), node.member->rank) != other.wait->peers.end();
    const bool opposite = counterpart && other.wait->what.starts_with("send") != node.wait->what.starts_with("send");
    takes_part = takes_part || opposite;
    // Thread ranks of one process wait for themselves alone.
    if (other.member->rank == m.rank || other.wait->thread == node.wait->thread) next.push_back(i);
  }
  if (takes_part) {
    next.resize(before);
    return;
  }
  if (next.size() > before) return;
  const std::string last =
      newest == nullptr
          ? "it has made no call"
          : fmt::format("its last call, {}, {} {} ago", newest->text(), newest->state == "done" ? "ended" : "began",
                        span_text(m.written_ms - (newest->ended_ms > 0 ? newest->ended_ms : newest->began_ms)));
  culprits[fmt::format("rank {} of {} (pid {} on {}) {}: {}", rank, g.title(), m.pid, m.host,
                       wanted > 0 ? fmt::format("has not made call #{}", wanted) : "is in no call that answers", last)]
      .push_back(waiter);
}

// "": there is none. Depth first; edges go from a wait to those for which it waits.
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

// All have made the call and none ends it: the rank for which the chain of steps waits.
std::string PostMortem::stuck_links() const {
  std::string text;
  for (const Node& n : nodes_) {
    if (n.wait->awaits < 0) continue;
    text += fmt::format("  rank {} waits for rank {}: {}\n", n.member->rank, n.wait->awaits, n.wait->what);
  }
  return text;
}

std::string PostMortem::report(bool* found) {
  nodes_.clear();
  std::string text;
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
                            w.peers.empty() ? "" : fmt::format(", needs {}", ranks_text(w.peers)));
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
    for (const uint32_t rank : nodes_[i].wait->peers) follow(nodes_[i], rank, culprits, edges[i]);
  }
  if (differences.empty()) {
    for (auto& [who, waiters] : culprits) {
      std::sort(waiters.begin(), waiters.end());
      waiters.erase(std::unique(waiters.begin(), waiters.end()), waiters.end());
      constexpr size_t kMost = 4;
      text += fmt::format("Culprit: {}.\n", who);
      for (size_t i = 0; i < std::min(kMost, waiters.size()); ++i) text += fmt::format("  {}\n", waiters[i]);
      if (waiters.size() > kMost) text += fmt::format("  and {} more\n", waiters.size() - kMost);
      *found = true;
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
  if (!*found && !nodes_.empty()) {
    const std::string stuck = stuck_links();
    text += "All ranks that are needed have made the same calls; look at what carries their data" +
            (stuck.empty() ? std::string(".\n") : ":\n" + stuck);
  }
  return text;
}

}  // namespace tools
