// SPDX-License-Identifier: Apache-2.0
#include "src/calibrate/simulate.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <span>

#include "src/algo/algorithm.h"
#include "src/algo/builder.h"
#include "src/algo/experts/expert_gather.h"
#include "src/algo/experts/expert_return.h"
#include "src/calibrate/layer_prices.h"
#include "src/calibrate/simulation_page.h"
#include "src/comm/collective.h"
#include "src/driver/file.h"
#include "src/moe/hybrid.h"
#include "src/moe/moe_config.h"
#include "src/plan/profile_file.h"
#include "src/routing/domains.h"
#include "src/routing/hiermoe_model.h"
#include "src/routing/routing_source.h"
#include "src/select/routing_price.h"
#include "src/select/selection.h"
#include "src/world/config.h"
#include "topology/discover.h"
#include "topology/synthetic.h"
#include "topology/tree.h"

namespace moeccl::comm {

namespace {

// A plan of more steps than this is simulated only if it is asked for by name: a step takes 48 bytes and some 0.3 us.
constexpr uint64_t kMostSteps = 4u << 20;
// A plan of more steps than this is never simulated: 3 GiB.
constexpr uint64_t kMostNamedSteps = 64u << 20;

std::string ranks_text(uint32_t n) { return format("{} rank{}", n, n == 1 ? "" : "s"); }

// The cluster that is simulated. `gpus` is true for a file of hosts in which every rank sits on a GPU. Their tree does
// not show that, because its innermost level is named "rank".
struct Cluster {
  plan::LevelTree tree;
  bool gpus = false;
};

Result<Cluster> read_cluster(const char* given) {
  if (given == nullptr || *given == 0)
    return error(moecclInvalidArgument, "topology is empty: give a text such as \"node:4(bw=25GB/s,lat=5us) gpu:8\"");
  MOECCL_ASSIGN_OR_RETURN(topology::Source source, topology::read_source(given, 0));
  Cluster cluster{std::move(source.tree), false};
  if (source.hosts.empty()) return cluster;
  MOECCL_ASSIGN_OR_RETURN(cluster.tree, topology::level_tree(source.hosts, uint32_t{0}));
  // A host that has GPUs seats all its ranks on them (topology/tree.h, default_seats).
  cluster.gpus = std::all_of(source.hosts.begin(), source.hosts.end(), [](const topology::Graph& host) {
    return !host.of_kind(topology::NodeKind::kGpu).empty();
  });
  return cluster;
}

// Returns why a plan of this many steps is not simulated, or "" if it is.
std::string too_large(uint64_t steps, bool named) {
  if (steps <= (named ? kMostNamedSteps : kMostSteps)) return "";
  if (steps > kMostNamedSteps) return format("{} steps a chunk, at most {} are simulated", steps, kMostNamedSteps);
  return format("{} steps a chunk; give it by name to simulate it all the same", steps);
}

// Prices a plan of all ranks on the clock of plan/cost.h.
Outcome priced(const plan::Plan& plan, const plan::LevelTree& tree, const plan::Profile& profile) {
  const plan::Cost cost = plan::price(plan, tree, profile);
  Outcome o;
  o.name = plan.algorithm;
  o.ns = cost.total_ns;
  o.level_bytes = cost.level_bytes;
  for (const double busy : cost.busiest_ns) o.busiest_share.push_back(busy / std::max(cost.total_ns, 1e-9));
  o.path = cost.path.summary();
  return o;
}

// Returns the candidate that the caller names, or "" for all.
std::string wanted_of(const moecclSimulateConfig_t& c) {
  return c.algorithm == nullptr || std::string_view(c.algorithm) == "auto" ? "" : c.algorithm;
}

Result<uint32_t> element_bytes_of(const moecclSimulateConfig_t& c) {
  if (const size_t bytes = moecclTypeSize(c.type); bytes > 0) return static_cast<uint32_t>(bytes);
  return error(moecclInvalidArgument, "type is {}: give a moecclDataType_t", static_cast<int>(c.type));
}

void add_elements(const moecclSimulateConfig_t& c, SimulationPage& page) {
  page.input("count", c.count);
  page.input("type", moecclTypeName(c.type));
  page.input("one_host", c.one_host);
}

// Returns the staging of an operation in a communicator that chooses its staging automatically.
uint64_t staging_of_operation(const SimulationPage& page) {
  return granted_staging(Config::staging_on(0, Config::Around::of(page.tree, page.hardware.profile)));
}

// Standard collectives: simulates every algorithm's plan.
Status simulate_collective(const moecclSimulateConfig_t& c, SimulationPage& page) {
  const plan::Profile& profile = page.hardware.profile;
  MOECCL_ASSIGN_OR_RETURN(const uint32_t element_bytes, element_bytes_of(c));
  MOECCL_TRY(check_count(page.tree, c.op, c.count, element_bytes));
  const Selector selector({.tree = page.tree,
                           .reach = {c.one_host != 0, false, c.one_host != 0},
                           .staging_bytes = staging_of_operation(page),
                           .profile = profile});
  const plan::Shape shape = selector.shape_of({c.op, 0, c.count, element_bytes, false}, false);
  const std::string wanted = wanted_of(c);
  if (!wanted.empty() && algo::find(c.op, wanted) == nullptr)
    return error(moecclInvalidArgument, "no algorithm \"{}\" for {}: there are {}", wanted, exec::op_name(c.op),
                 algo::names_of(c.op, ", "));
  add_elements(c, page);
  page.title = format("{} of {} elements ({} a block) on {}: {}", exec::op_name(c.op), c.count,
                      plan::bytes_text(c.count * shape.element_bytes), ranks_text(shape.n_ranks),
                      topology::to_synthetic(page.tree));
  for (const algo::Algorithm& a : algo::algorithms()) {
    if (a.op != c.op || (!wanted.empty() && wanted != a.name && !is_flat(a.name))) continue;
    Status possible = a.applies(shape, page.tree);
    if (possible.ok()) possible = algo::chunks_cover(shape, a.chunking(shape, page.tree));
    if (!possible.ok()) {
      page.refuse(a.name, possible.message());
      continue;
    }
    // Rank 0 is the root, which may have more to do than all others together.
    uint64_t steps = a.build(shape, page.tree, 0).n_steps();
    if (shape.n_ranks > 1) steps += uint64_t{a.build(shape, page.tree, 1).n_steps()} * (shape.n_ranks - 1);
    if (std::string why = too_large(steps, wanted == a.name); !why.empty())
      page.refuse(a.name, std::move(why), true);
    else
      page.outcomes.push_back(priced(algo::build_all(a, shape, page.tree), page.tree, profile));
  }
  return {};
}

Result<algo::Domains> domains_of(const moecclSimulateConfig_t& c, const plan::LevelTree& tree) {
  if (c.n_levels != static_cast<int64_t>(tree.depth()))
    return error(moecclInvalidArgument, "n_levels is {}: the topology has {} level{}, give a domain size for each",
                 c.n_levels, tree.depth(), tree.depth() == 1 ? "" : "s");
  if (std::any_of(c.domain, c.domain + c.n_levels, [](int32_t s) { return s < 1; }))
    return error(moecclInvalidArgument, "domain has a size below 1: give 1 or more for each level");
  return algo::Domains::make(tree, {c.domain, c.domain + c.n_levels});
}

// Returns " in domains of 2 dc, 4 gpu" and adds them to the page's inputs.
std::string domains_text(const algo::Domains& domains, SimulationPage& page) {
  std::vector<int32_t> sizes;
  std::string text = " in domains of";
  for (uint32_t l = 0; l < page.tree.depth(); ++l) {
    sizes.push_back(static_cast<int32_t>(domains.sizes()[l]));
    text += format("{} {} {}", l == 0 ? "" : ",", domains.sizes()[l], page.tree.levels[l].name);
  }
  page.input_list("domain", sizes);
  return text;
}

void add_owners(const moecclSimulateConfig_t& c, SimulationPage& page) {
  if (c.expert_rank != nullptr) page.input_list("expert_rank", {c.expert_rank, static_cast<size_t>(c.n_experts)});
}

// Simulates bringing experts into their domains, or their gradients back to the owners (hybrid.h).
template <class Exchange>
Status simulate_exchange(const moecclSimulateConfig_t& c, SimulationPage& page) {
  if (c.domain == nullptr)
    return error(moecclInvalidArgument, "domain is NULL: {} needs the sizes of expert domains", exec::op_name(c.op));
  algo::ExpertExchange call;
  call.count = c.count;
  MOECCL_ASSIGN_OR_RETURN(call.element_bytes, element_bytes_of(c));
  if (c.n_experts < 0) return error(moecclInvalidArgument, "n_experts is {}: give 1 or more", c.n_experts);
  if (c.count > kMostExpertBytes / call.element_bytes)
    return error(moecclInvalidArgument, "count is {}: give the elements of one expert, at most 2^40 bytes", c.count);
  call.staging_bytes = staging_of_operation(page);
  call.round_trip_bytes = algo::round_trip_bytes(page.tree, page.hardware.profile);
  MOECCL_ASSIGN_OR_RETURN(const algo::Domains domains, domains_of(c, page.tree));
  MOECCL_ASSIGN_OR_RETURN(const algo::Placement homes,
                          algo::Placement::make(c.n_experts > 0 ? c.n_experts : 256, page.tree.n_ranks, c.expert_rank));
  const std::string wanted = wanted_of(c);
  if (!wanted.empty() && wanted != "staged" && wanted != "direct")
    return error(moecclInvalidArgument, "no algorithm \"{}\" for {}: there are staged, direct", wanted,
                 exec::op_name(c.op));
  page.has_flat = false;
  add_elements(c, page);
  page.input("experts", homes.n_experts());
  add_owners(c, page);
  page.title = format("{} of {} experts of {}{} on {}: {}", exec::op_name(c.op), homes.n_experts(),
                      plan::bytes_text(call.count * call.element_bytes), domains_text(domains, page),
                      ranks_text(page.tree.n_ranks), topology::to_synthetic(page.tree));
  for (const bool views : {false, true}) {
    if (!wanted.empty() && (wanted == "direct") != views) continue;
    const char* name = views ? "direct" : "staged";
    call.way = Exchange::way_of(name);
    call.reach = {c.one_host != 0, views, views || c.one_host != 0};
    if (views && c.one_host == 0) {
      page.refuse(name, "ranks of several hosts cannot read each other's buffers");
      continue;
    }
    const Result<Exchange> made = Exchange::make(domains, homes, call);
    if (!made.ok()) {
      page.refuse(name, made.status().message());
      continue;
    }
    const uint64_t steps = uint64_t{made->build(0).n_steps()} * page.tree.n_ranks;
    if (std::string why = too_large(steps, !wanted.empty()); !why.empty())
      page.refuse(name, std::move(why), true);
    else
      page.outcomes.push_back(priced(made->build_all(), page.tree, page.hardware.profile));
  }
  return {};
}

struct MoeQuestion {
  algo::GlobalRouting routing;
  algo::Placement placement;
  uint64_t row_bytes = 14336;
};

// A trace has its own figures; those of the caller, such as the length of expert_rank, may only repeat them.
Status agrees(const char* name, int32_t given, uint32_t of_trace) {
  if (given == 0 || static_cast<uint32_t>(given) == of_trace) return {};
  return error(moecclInvalidArgument, "{} is {}, and the trace has {}: give {} or 0", name, given, of_trace, of_trace);
}

Result<MoeQuestion> moe_question(const moecclSimulateConfig_t& c, uint32_t n_ranks, SimulationPage& page) {
  MoeQuestion q;
  if (c.hidden_bytes > UINT32_MAX)
    return error(moecclInvalidArgument, "hidden_bytes is {}: a row has between 1 and {} bytes", c.hidden_bytes,
                 UINT32_MAX);
  if (c.hidden_bytes > 0) q.row_bytes = c.hidden_bytes;
  if (c.layout != moecclLayoutRows && c.layout != moecclLayoutExpertMajor)
    return error(moecclInvalidArgument, "layout is {}: moecclLayoutRows or moecclLayoutExpertMajor",
                 static_cast<int>(c.layout));
  if (c.top_k < 0 || c.n_experts < 0 || c.n_experts > 65535)
    return error(moecclInvalidArgument, "top_k is {}, n_experts is {}: give 0 or more, and at most 65535 experts",
                 c.top_k, c.n_experts);
  algo::RoutingRequest request;
  request.n_ranks = n_ranks;
  request.n_experts = c.n_experts > 0 ? static_cast<uint32_t>(c.n_experts) : 256;
  request.top_k = c.top_k > 0 ? static_cast<uint32_t>(c.top_k) : 8;
  request.tokens_per_rank = c.tokens_per_rank;
  request.seed = c.seed;
  const std::string kind_text = c.routing == nullptr || *c.routing == 0 ? "uniform" : c.routing;
  MOECCL_ASSIGN_OR_RETURN(const algo::RoutingKind kind, algo::parse_routing_kind(kind_text));
  if (kind.kind == algo::RoutingKind::kTrace) {
    MOECCL_ASSIGN_OR_RETURN(const std::string file, driver::read_file(kind.path));
    algo::TraceShape shape;
    MOECCL_ASSIGN_OR_RETURN(
        q.routing, algo::read_trace(std::as_bytes(std::span(file.data(), file.size())), kind, request, &shape));
    MOECCL_TRY(agrees("n_experts", c.n_experts, shape.n_experts));
    MOECCL_TRY(agrees("top_k", c.top_k, shape.top_k));
    request.n_experts = shape.n_experts;
    request.top_k = shape.top_k;
  } else {
    if (request.tokens_per_rank == 0) request.tokens_per_rank = 512;
    MOECCL_ASSIGN_OR_RETURN(q.routing, algo::make_routing(request, kind.exponent));
  }
  MOECCL_ASSIGN_OR_RETURN(q.placement, algo::Placement::make(request.n_experts, n_ranks, c.expert_rank));
  const char* const layout = c.layout == moecclLayoutExpertMajor ? "ExpertMajor" : "Rows";
  page.input("tokens", q.routing.n_tokens());
  page.input("row_bytes", q.row_bytes);
  page.input("topk", request.top_k);
  page.input("experts", request.n_experts);
  add_owners(c, page);
  page.input("layout", layout);
  page.input("routing", kind_text);
  if (kind.kind != algo::RoutingKind::kTrace) page.input("seed", c.seed);
  page.title =
      format("dispatch + combine on {}: {}\n{} tokens in all, top-{} of {} experts, rows of {} bytes, layout {}, {}",
             ranks_text(n_ranks), topology::to_synthetic(page.tree), q.routing.n_tokens(), request.top_k,
             request.n_experts, q.row_bytes, layout, kind_text);
  return q;
}

Status simulate_layer(const moecclSimulateConfig_t& c, SimulationPage& page) {
  const plan::Profile& profile = page.hardware.profile;
  const uint32_t n = page.tree.n_ranks;
  if (n > algo::kMaxTrafficRanks)
    return error(moecclUnsupported, "a layer on {} ranks: at most {} are simulated", n, algo::kMaxTrafficRanks);
  MOECCL_ASSIGN_OR_RETURN(const MoeQuestion q, moe_question(c, n, page));
  page.moe = true;
  std::vector<algo::MoeAlgorithm> wanted = algo::moe_candidates(page.tree);
  const bool named = !wanted_of(c).empty();
  if (named) {
    MOECCL_ASSIGN_OR_RETURN(const algo::MoeAlgorithm only, algo::parse_moe_algorithm(c.algorithm, page.tree));
    wanted = {only};
    if (only.kind != algo::PathKind::kFlat) wanted.push_back({algo::PathKind::kFlat, 1});
  }
  std::optional<algo::Domains> domains;
  if (c.domain != nullptr) {
    MOECCL_ASSIGN_OR_RETURN(domains, domains_of(c, page.tree));
    page.title += ", experts" + domains_text(*domains, page);
    if (std::erase_if(wanted, [](const algo::MoeAlgorithm& a) { return a.kind == algo::PathKind::k2dh; }) > 0 && named)
      return error(moecclInvalidArgument, "algorithm is 2dh, which has no plan with domains: give flat or hier:D");
  }
  const algo::Domains* with = domains ? &*domains : nullptr;
  std::deque<LayerPlan> plans;
  for (const algo::MoeAlgorithm& a : wanted) plans.emplace_back(a, page.tree, q.placement, with);
  const algo::RoutedLayer layer{page.tree, q.placement, q.routing, c.layout == moecclLayoutExpertMajor, with};
  MOECCL_TRY(count_layer(plans, layer, [](uint64_t steps) { return too_large(steps, true); }));
  MOECCL_TRY(price_layer(plans, page.tree, profile, q.row_bytes));
  // Without figures for links, the clock prices only copies; the measured AlltoAlls know more. Then only plans for
  // which there are some can be compared.
  const bool by_equations = !algo::links_known(page.tree) && profile.links.empty() &&
                            std::any_of(plans.begin(), plans.end(), [&](const LayerPlan& p) {
                              return p.refusal.empty() && algo::hiermoe_knows(p.algorithm, profile.all_to_all).ok();
                            });
  for (const LayerPlan& p : plans) {
    const algo::MoeAlgorithm& a = p.algorithm;
    const Status knows = algo::hiermoe_knows(a, profile.all_to_all);
    if (!p.refusal.empty() || (by_equations && !knows.ok())) {
      page.refuse(a.name(), !p.refusal.empty() ? p.refusal : knows.message());
      continue;
    }
    Outcome o;
    o.name = a.name();
    const algo::MoeCost &there = p.prices().dispatch, &back = p.prices().combine;
    o.dispatch_ns = there.cost.total_ns;
    o.combine_ns = back.cost.total_ns;
    o.ns = o.dispatch_ns + o.combine_ns;
    for (uint32_t l = 0; l < page.tree.depth(); ++l) {
      o.level_bytes.push_back(there.cost.level_bytes[l] + back.cost.level_bytes[l]);
      o.busiest_share.push_back((there.cost.busiest_ns[l] + back.cost.busiest_ns[l]) / o.ns);
    }
    o.path = format("dispatch {}; combine {}", there.cost.path.summary(), back.cost.path.summary());
    o.note = format("{} chunks, {} of staging", there.n_chunks, plan::bytes_text(there.staging_bytes));
    if (knows.ok()) {
      o.closed_form_ns = 2 * algo::hiermoe_time(a, p.traffic, page.tree, profile.all_to_all, q.row_bytes).total_ns;
      if (by_equations) {
        o.ns = o.closed_form_ns;
        o.dispatch_ns = o.combine_ns = o.ns / 2;
        o.path = "HierMoE Eq. 1-6 under the profile's AlltoAlls; no link is known";
      }
    }
    page.outcomes.push_back(std::move(o));
  }
  return {};
}

}  // namespace

Result<std::string> simulate(const moecclSimulateConfig_t& config) {
  if (config.expert_rank != nullptr && config.n_experts == 0)
    return error(moecclInvalidArgument, "n_experts is 0 with expert_rank: give the number of ranks in expert_rank");
  MOECCL_ASSIGN_OR_RETURN(const Cluster cluster, read_cluster(config.topology));
  plan::LevelTree tree = cluster.tree;
  // Ranks that can only put are on several hosts, whatever the topology calls its levels.
  tree.n_far_levels = config.one_host != 0 ? 0 : std::max(1u, plan::far_levels_by_name(tree));
  SimulationPage page{"", cluster.gpus ? plan::kernel_hardware() : plan::hardware_of(tree), "", tree, false, true, {}};
  page.op = config.op;
  page.input("algorithms", config.algorithm == nullptr || *config.algorithm == 0 ? "auto" : config.algorithm);
  plan::Profile& profile = page.hardware.profile;
  if (config.profile != nullptr && *config.profile != 0) {
    page.file = config.profile;
    MOECCL_ASSIGN_OR_RETURN(const std::string text, driver::read_file(page.file));
    MOECCL_ASSIGN_OR_RETURN(profile, plan::read_profile(text, page.file, profile));
    if (!profile.links.empty()) MOECCL_TRY(plan::profile_fits(profile, tree));
    // A text without figures may also name levels whose links the profile knows.
    if (config.one_host != 0 || profile.tree_hash == tree.hash()) profile.forget_links_within_hosts(tree);
  }
  // Every simulated rank has its own core or GPU.
  profile.cores = std::max(profile.cores, tree.n_ranks);
  profile.host_level = -1;
  profile.host_copy_bytes_per_ns = std::max(profile.host_copy_bytes_per_ns, profile.copy_bytes_per_ns * tree.n_ranks);
  switch (config.op) {
    case moecclOpDispatch:
    case moecclOpCombine:
      MOECCL_TRY(simulate_layer(config, page));
      break;
    case moecclOpExpertGather:
      MOECCL_TRY(simulate_exchange<algo::ExpertGather>(config, page));
      break;
    case moecclOpExpertReduce:
      MOECCL_TRY(simulate_exchange<algo::ExpertReturn>(config, page));
      break;
    case moecclOpExpertAllReduce:
    case moecclOpCollectGradients:
    case moecclOpPlaceWeights:
    case moecclOpReduceGradients:
      return error(moecclInvalidArgument, "op is {}: its plan depends on a placement of slots, ask moecclExpertExplain",
                   exec::op_name(config.op));
    case moecclOpTensorAllToAllv:
      return error(moecclInvalidArgument, "op is {}: its plan depends on the blocks' sizes, give tensor_alltoall",
                   exec::op_name(config.op));
    case moecclOpSendRecv:
    case moecclOpAllToAllv:
      return error(moecclInvalidArgument, "op is {}: give a collective of equal blocks, or dispatch",
                   exec::op_name(config.op));
    default:
      MOECCL_TRY(simulate_collective(config, page));
  }
  if (page.fastest() == nullptr) {
    std::string why;
    for (const Outcome& o : page.outcomes) why += format("{}{}: {}", why.empty() ? "" : "; ", o.name, o.refusal);
    return error(moecclUnsupported, "no candidate of {} can be simulated: {}", exec::op_name(config.op), why);
  }
  return config.json != 0 ? page.as_json() : page.as_text();
}

}  // namespace moeccl::comm
