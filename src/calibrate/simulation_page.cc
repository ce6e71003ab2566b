// SPDX-License-Identifier: Apache-2.0
#include "src/calibrate/simulation_page.h"

#include <algorithm>

#include "src/plan/op.h"
#include "src/plan/printer.h"
#include "topology/synthetic.h"

namespace moeccl::comm {
namespace {

// The least factor that is called a gain. A simulation cannot tell smaller ones.
constexpr double kGain = 1.02;

const Outcome* flat(const SimulationPage& page) {
  for (const Outcome& o : page.outcomes)
    if (is_flat(o.name) && o.refusal.empty()) return &o;
  return nullptr;
}

std::string comparison(const SimulationPage& page) {
  const Outcome* best = page.fastest();
  const Outcome* base = flat(page);
  if (base == nullptr && !page.has_flat) return format("fastest: {}", best->name);
  if (base == nullptr) return format("fastest: {}; flat was not simulated, so a gain over it is not known", best->name);
  if (base->ns < kGain * best->ns) {
    return best == base ? format("no gain: the {} algorithm is the fastest", base->name)
                        : format("no gain: {} is within 2 % of the {} algorithm", best->name, base->name);
  }
  return format("fastest: {}, {:.2f}x faster than {}", best->name, base->ns / best->ns, base->name);
}

std::string verdict(const SimulationPage& page) {
  std::string unknown;
  for (const Outcome& o : page.outcomes)
    if (o.too_large) unknown += (unknown.empty() ? "" : ", ") + o.name;
  if (unknown.empty()) return comparison(page);
  return format("of the candidates that were simulated: {}. Not simulated, because they have too many steps: {}",
                comparison(page), unknown);
}

// A figure that is not the hardware's own comes from the file.
const char* source_of(const SimulationPage& page, const plan::Constant& c) {
  return page.hardware.profile.*c.member == c.value ? c.source : page.file.c_str();
}

const char* source_of_links(const SimulationPage& page) {
  const auto has = [](const plan::LinkCost& link) { return link.bytes_per_ns > 0; };
  if (std::ranges::any_of(page.hardware.profile.links, has)) return "profile";
  return std::ranges::any_of(page.tree.levels, has, &plan::Level::link) ? "topology" : "none";
}

}  // namespace

const Outcome* SimulationPage::fastest() const {
  const Outcome* best = nullptr;
  for (const Outcome& o : outcomes)
    if (o.refusal.empty() && (best == nullptr || o.ns < best->ns)) best = &o;
  return best;
}

std::string SimulationPage::as_text() const {
  std::string t = format("SIMULATED: nothing ran; times are predictions\n{}\n", title);
  if (std::string_view(source_of_links(*this)) == "none")
    t += "links without a cost, because neither a profile nor the topology gives one: give bandwidths, such as "
         "node:2(bw=50GB/s,lat=5us)\n";
  const Outcome *base = flat(*this), *best = fastest();
  for (const Outcome& o : outcomes) {
    if (!o.refusal.empty()) {
      t += format("    {:10} not simulated: {}\n", o.name, o.refusal);
      continue;
    }
    t += format("  {} {:10} {:>12}", &o == best ? "*" : " ", o.name, plan::time_text(o.ns));
    if (moe) t += format("  (dispatch {}, combine {})", plan::time_text(o.dispatch_ns), plan::time_text(o.combine_ns));
    if (base != nullptr) t += format("  {:.2f}x {}", base->ns / std::max(o.ns, 1e-9), base->name);
    if (o.closed_form_ns > 0) t += format("  HierMoE Eq. 1-6: {}", plan::time_text(o.closed_form_ns));
    t += "\n";
    for (uint32_t l = 0; l < tree.depth(); ++l)
      t += format("        {:12} {:>12} cross, busiest uplink in use {:.0f} %\n", tree.levels[l].name,
                  plan::bytes_text(o.level_bytes[l]), 100 * o.busiest_share[l]);
    t += format("        critical path: {}\n", o.path);
    if (!o.note.empty()) t += format("        {}\n", o.note);
  }
  t += verdict(*this) + "\n";
  t += format("constants: {}{}{}\n", hardware.name, file.empty() ? "" : ", overridden by ", file);
  for (const plan::Constant& c : hardware.constants)
    t += format("    {:26} {:>8}  {}\n", c.name, hardware.profile.*c.member, source_of(*this, c));
  return t;
}

std::string SimulationPage::as_json() const {
  std::string t =
      format("{{\n  \"simulated\": true,\n  \"emulated\": true,\n  \"op\": {},\n  \"topology\": {},\n  \"ranks\": {},",
             json_quoted(plan::op_name(op)), json_quoted(topology::to_synthetic(tree)), tree.n_ranks);
  for (const auto& [key, value] : inputs) t += format("\n  \"{}\": {},", key, value);
  t += format("\n  \"links\": \"{}\",\n  \"candidates\": [", source_of_links(*this));
  const Outcome* base = flat(*this);
  for (const Outcome& o : outcomes) {
    t += format("{}\n    {{\"algorithm\": \"{}\"", &o == &outcomes.front() ? "" : ",", o.name);
    if (!o.refusal.empty()) {
      t += format(", \"simulated\": false, \"reason\": {}}}", json_quoted(o.refusal));
      continue;
    }
    t += format(", \"simulated\": true, \"ns\": {:.1f}", o.ns);
    if (moe) t += format(", \"dispatch_ns\": {:.1f}, \"combine_ns\": {:.1f}", o.dispatch_ns, o.combine_ns);
    if (o.closed_form_ns > 0) t += format(", \"hiermoe_ns\": {:.1f}", o.closed_form_ns);
    if (base != nullptr) t += format(", \"over_flat\": {:.4f}", base->ns / std::max(o.ns, 1e-9));
    t += format(", \"critical_path\": {}", json_quoted(o.path));
    t += ", \"level_bytes\": [";
    for (size_t l = 0; l < o.level_bytes.size(); ++l) t += format("{}{}", l ? ", " : "", o.level_bytes[l]);
    t += "]}";
  }
  t += format("\n  ],\n  \"constants\": {{\"hardware\": {}, \"profile\": {}", json_quoted(hardware.name),
              json_quoted(file));
  for (const plan::Constant& c : hardware.constants)
    t += format(",\n    \"{}\": {{\"value\": {}, \"source\": {}}}", c.name, hardware.profile.*c.member,
                json_quoted(source_of(*this, c)));
  return t + format("\n  }},\n  \"fastest\": \"{}\",\n  \"verdict\": \"{}\"\n}}\n", fastest()->name, verdict(*this));
}

}  // namespace moeccl::comm
