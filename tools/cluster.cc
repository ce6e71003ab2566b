// SPDX-License-Identifier: Apache-2.0
#include "tools/cluster.h"

#include <fmt/format.h>
#include <moeccl/moeccl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tools/solve.h"

namespace tools {
namespace {

using Json = nlohmann::json;

// Returns the levels of a synthetic text or a file as a synthetic text.
std::string levels_text(const std::string& topology) {
  size_t needed = 0;
  const auto describe = [&](char* text, size_t bytes) {
    if (moecclTopologyDescribe(topology.c_str(), moecclTopologyLevels, text, bytes, &needed) != moecclSuccess)
      fail(std::string("--topology: ") + moecclGetLastError(nullptr));
  };
  describe(nullptr, 0);
  std::string text(needed, '\0');
  describe(text.data(), text.size());
  text.pop_back();  // the final zero
  return text;
}

// Returns the value of "bw=11.34GB/s" in GB/s or of "lat=497us" in us, out of a level's text; 0 without one.
double figure(const std::string& text, const std::string& name) {
  static const std::vector<std::pair<std::string, double>> units = {
      {"Mbit/s", 0.125e-3}, {"Gbit/s", 0.125}, {"KB/s", 1e-6}, {"MB/s", 1e-3}, {"GB/s", 1}, {"TB/s", 1e3},
      {"B/s", 1e-9},        {"ns", 1e-3},      {"us", 1},      {"ms", 1e3},    {"s", 1e6}};
  const size_t at = text.find(name + "=");
  if (at == std::string::npos) return 0;
  const std::string written = text.substr(at + name.size() + 1);
  size_t length = 0;
  const double value = std::stod(written, &length);
  const std::string unit = written.substr(length, written.find_first_of(",)") - length);
  for (const auto& [known, scale] : units)
    if (unit == known) return value * scale;
  fail("--topology: the library gave " + text + ", whose unit " + unit + " is not known");
}

double number(const Json& object, const char* name) { return object.value(name, 0.0); }

}  // namespace

Json read_profile_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) fail("--profile " + path + ": cannot be opened: " + std::strerror(errno));
  return Json::parse(file, nullptr, false);
}

void Cluster::add_options(perf::App& app) {
  options_ = {app.add_option("--topology", topology_,
                             "the cluster, such as 'node:4(bw=25GB/s,lat=5us) gpu:8(bw=200GB/s)', or a file: such a "
                             "text, MoECCL's JSON or hwloc's XML (default: the profile's)"),
              app.add_option("--profile", profile_,
                             "profile file of that cluster, see docs/calibration.md; its links count before the "
                             "topology's. Options override both")};
}

void Cluster::excludes(perf::Option* shape) {
  for (perf::Option* option : options_) option->excludes(shape);
}

void Cluster::read() {
  std::string topology = topology_;
  if (!profile_.empty()) {
    json_ = std::make_shared<const Json>(read_profile_file(profile_));
    read_profile([&](const Json& profile) {
      if (topology.empty()) topology = profile.value("topology", "");
    });
    if (topology.empty()) fail("--profile " + profile_ + " names no topology: give --topology too");
  }
  read_levels(levels_text(topology));
  if (!profile_.empty()) read_profile([&](const Json& profile) { read_links(profile); });
}

template <class Read>
void Cluster::read_profile(const Read& read) const {
  if (!json_->is_object() || !json_->contains("moeccl_profile"))
    fail("--profile " + profile_ + ": this is not a profile: moeccl calibrate makes one");
  try {
    read(*json_);
  } catch (const Json::exception& e) {
    fail("--profile " + profile_ + ": " + e.what());
  }
}

// A text such as "node:4(bw=11.34GB/s,lat=497us) island:2[0,2 1,3] gpu:2".
void Cluster::read_levels(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const size_t colon = text.find(':', at);
    Level level;
    level.name = text.substr(at, colon - at);
    size_t length = 0;
    level.scale = std::stoi(text.substr(colon + 1), &length);
    size_t end = colon + 1 + length;
    if (text[end] == '+')
      fail("--topology: groups of level " + level.name + " differ in size: the solvers need equal ones");
    if (text[end] == '[') end = text.find(']', end) + 1;
    const size_t next = std::min(text.find(' ', end), text.size());
    const std::string link = text.substr(end, next - end);
    levels_.push_back(level);
    // The text has what the ranks of a group share.
    levels_.back().gbs = figure(link, "bw") * groups(levels_.size() - 1);
    levels_.back().alpha_us = figure(link, "lat");
    at = next + 1;
  }
  for (Level& level : levels_) level.gbs /= n_ranks();
}

// A level that the topology has as a link, or that joins hosts, has the line of its ping-pong if that has a bandwidth
// (the library does the same in plan::link_of). Ping-pongs inside a host say nothing of the time when all ranks copy:
// the AlltoAlls do, or the rate of a whole host.
void Cluster::read_links(const Json& profile) {
  const Json lines = profile.value("levels", Json::array());
  if (!lines.empty() && lines.size() != depth())
    fail(fmt::format("--profile {} has {} levels, the topology {}", profile_, lines.size(), depth()));
  const Json all = profile.value("alltoall", Json::object());
  const Json inter = all.value("inter", Json::array()), intra = all.value("intra", Json::array());
  const auto host_level = profile.value("machine", Json::object()).value("host_level", int64_t{-1});
  const bool one_host = host_level < 0 || host_level >= static_cast<int64_t>(depth());
  const size_t host = one_host ? 0 : static_cast<size_t>(host_level) + 1;  // the first level inside a host
  const double ranks_per_host = one_host ? n_ranks() : static_cast<double>(n_ranks()) / groups(host - 1);
  for (size_t l = 0; l < depth(); ++l) {
    Level& level = levels_[l];
    const Json line = l < lines.size() ? lines[l] : Json::object();
    // The ranks that meet across a level each give a share of their bytes to themselves.
    const Json& list = l + 1 < depth() ? inter : intra;
    const size_t at = l + 1 < depth() ? l : l - 1;
    const Json met = depth() == 1       ? all.value("standard", Json::object())
                     : at < list.size() ? list[at]
                                        : Json::object();
    const double crosses = level.scale > 1 ? 1 - 1.0 / level.scale : 1;
    if (number(line, "bytes_per_ns") > 0 && (l < host || level.gbs > 0)) {
      level.gbs = number(line, "bytes_per_ns") * groups(l) / n_ranks();
      level.alpha_us = number(line, "alpha_ns") / 1e3;
    } else if (number(met, "bytes_per_ns") > 0) {
      level.gbs = number(met, "bytes_per_ns") * crosses;
      level.alpha_us = number(met, "alpha_ns") / 1e3;
    } else if (level.gbs <= 0 && l >= host) {
      level.gbs = machine("host_copy_bytes_per_ns") / ranks_per_host;
    }
  }
}

int32_t Cluster::groups(size_t level) const {
  int32_t n = 1;
  for (size_t l = 0; l <= level; ++l) n *= levels_[l].scale;
  return n;
}

double Cluster::gbs(size_t level) const {
  const Level& l = levels_[level];
  if (l.gbs <= 0)
    fail("--topology: level " + l.name + " has no bandwidth: give it one, as in " + l.name + ":" +
         std::to_string(l.scale) + "(bw=25GB/s), or a --profile that has its link");
  return l.gbs;
}

size_t Cluster::node_level() const {
  for (size_t l = 0; l < depth(); ++l)
    if (levels_[l].name == "node" || levels_[l].name == "host") return l;
  return 0;
}

double Cluster::between_gbs(double otherwise) const {
  double least = 0;
  for (size_t l = 0; l <= node_level(); ++l)
    if (crossed(l)) least = least > 0 ? std::min(least, gbs(l)) : gbs(l);
  return least > 0 ? least : otherwise;
}

double Cluster::between_alpha_us() const {
  double most = 0;
  for (size_t l = 0; l <= node_level(); ++l) most = std::max(most, alpha_us(l));
  return most;
}

double Cluster::inside_gbs() const {
  const size_t first = node_level() + 1;
  if (first >= depth())
    fail("--topology has no level inside its nodes: give one of nodes and one inside them, such as node:2 gpu:8");
  double least = gbs(first);
  for (size_t l = first + 1; l < depth(); ++l) least = std::min(least, gbs(l));
  return least;
}

double Cluster::inside_alpha_us() const {
  double most = 0;
  for (size_t l = node_level() + 1; l < depth(); ++l) most = std::max(most, alpha_us(l));
  return most;
}

double Cluster::machine(const std::string& name) const {
  double value = 0;
  if (!profile_.empty())
    read_profile([&](const Json& profile) { value = number(profile.value("machine", Json::object()), name.c_str()); });
  return value;
}

std::string Cluster::text(const std::vector<std::pair<const char*, const perf::Option*>>& options) const {
  std::string links, given;
  for (const auto& [name, option] : options)
    if (!option->empty()) given += fmt::format("{}{}", given.empty() ? "; the page goes by " : " and ", name);
  for (const Level& l : levels_) {
    const std::string rate = l.gbs > 0 ? fmt::format("{:.4g} GB/s", l.gbs) : "no figure";
    links += fmt::format("{}{} {}, {:.4g} us", links.empty() ? "" : "; ", l.name, rate, l.alpha_us);
  }
  return fmt::format("links of a rank: {} ({}{})\n", links, profile_.empty() ? "the topology" : profile_, given);
}

}  // namespace tools
