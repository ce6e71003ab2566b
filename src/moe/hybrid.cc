// SPDX-License-Identifier: Apache-2.0
#include "src/moe/hybrid.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/cuda/args.h"
#include "src/algo/experts/prove_experts.h"
#include "src/base/adopt.h"
#include "src/base/hash.h"
#include "src/comm/prove_if_asked.h"
#include "src/moe/creation.h"
#include "src/plan/hardware.h"
#include "src/solve/domains.h"

namespace moeccl::comm {

namespace {

// The stream model's problem for a communicator: its levels, and one rank's bytes per second of each level's uplink.
struct ModelProblem {
  std::vector<int32_t> sizes;
  std::vector<double> bandwidth, latency_s;
  moecclDomainProblem_t problem = MOECCL_DOMAIN_PROBLEM_INIT;
};

// Returns the codec's bytes per second on one rank: as given, 0 for one that takes no time, or the profile's rate.
// Ranks that share a core take turns.
double codec_bandwidth(double given, double bytes_per_ns, double ranks_per_core) {
  if (given < 0) return 0;
  return given != 0 ? given : 1e9 * bytes_per_ns / std::max(1.0, ranks_per_core);
}

ModelProblem model_of(const Communicator& comm, const moecclHybridConfig_t& c) {
  const plan::LevelTree& tree = comm.tree();
  const std::shared_ptr<const plan::Profile> kept = comm.selector().profile();
  const plan::Profile& profile = *kept;
  ModelProblem m;
  for (uint32_t l = 0; l < tree.depth(); ++l) {
    const plan::Level& level = tree.levels[l];
    std::vector<int32_t> children(l == 0 ? 1 : tree.levels[l - 1].n_groups, 0);
    std::vector<uint32_t> members(level.n_groups, 0);
    for (uint32_t r = 0; r < tree.n_ranks; ++r) {
      const uint32_t parent = l == 0 ? 0 : tree.levels[l - 1].group_of_rank[r];
      children[parent] += members[level.group_of_rank[r]]++ == 0;
    }
    m.sizes.insert(m.sizes.end(), children.begin(), children.end());
    const plan::LinkCost& link = plan::link_of(tree, profile, l);
    const uint32_t sharing = *std::max_element(members.begin(), members.end());
    m.bandwidth.push_back(
        1e9 * (link.bytes_per_ns > 0 ? link.bytes_per_ns / sharing : profile.host_copy_bytes_per_ns / tree.n_ranks));
    m.latency_s.push_back(link.alpha_ns / 1e9);
  }
  m.problem.n_levels = static_cast<int32_t>(tree.depth());
  m.problem.sizes = m.sizes.data();
  m.problem.bandwidth = m.bandwidth.data();
  m.problem.data_bytes = c.data_bytes;
  m.problem.expert_bytes = c.expert_bytes;
  m.problem.pre_expert_s = c.pre_expert_s;
  m.problem.compression = c.compression;
  m.problem.min_gain = c.min_gain;
  m.problem.top_k = c.top_k;
  m.problem.n_experts = c.n_experts;
  m.problem.latency_s = m.latency_s.data();
  m.problem.expert_s = c.expert_s;
  m.problem.backward_s = c.backward_s;
  m.problem.gradient_bytes = c.gradient_bytes;
  // A communicator with CUDA has its experts on the device, as its layers' rows (communicator_host.cc).
  const plan::Profile codec = comm.cuda() != nullptr ? plan::kernel_hardware().profile : profile;
  const double ranks_per_core = plan::ranks_per_host(tree, codec) / std::max(1u, codec.cores);
  m.problem.encode_bandwidth = codec_bandwidth(c.encode_bandwidth, codec.encode_bytes_per_ns, ranks_per_core);
  m.problem.decode_bandwidth = codec_bandwidth(c.decode_bandwidth, codec.decode_bytes_per_ns, ranks_per_core);
  m.problem.forward_only = c.forward_only;
  m.problem.gradient_ratio = c.gradient_ratio;
  return m;
}

// The problem's fields come from the config under the same names, so an error about one is about the other.
Result<moecclDomainProblem_t> checked(const moecclDomainProblem_t& problem) {
  Result<moecclDomainProblem_t> p = solve::checked(problem);
  constexpr std::string_view kOurs = "problem.";
  if (p.ok() || !p.status().message().starts_with(kOurs)) return p;
  return error(p.status().code(), "config.{}", p.status().message().substr(kOurs.size()));
}

// Returns the given sizes, or those with the least latency. *answer gets the model's times if there are figures.
Result<std::vector<uint32_t>> choose_sizes(const Communicator& comm, const moecclHybridConfig_t& c,
                                           moecclDomainAnswer_t* answer) {
  const uint32_t depth = comm.tree().depth();
  const bool figures = c.data_bytes != 0 || c.expert_bytes != 0;
  if (c.domain == nullptr && !figures)
    return error(moecclInvalidArgument,
                 "config.domain is NULL and data_bytes and expert_bytes are 0: give sizes, or figures to choose by");
  if (c.domain != nullptr && c.n_levels != static_cast<int32_t>(depth))
    return error(moecclInvalidArgument,
                 "config.n_levels is {}: the communicator's topology has {} level{}, give a domain size for each",
                 c.n_levels, depth, depth == 1 ? "" : "s");
  if (depth > MOECCL_MAX_LEVELS)
    return error(moecclUnsupported, "the topology has {} levels, at most {} are possible: merge some", depth,
                 MOECCL_MAX_LEVELS);
  for (uint32_t l = 0; c.domain != nullptr && l < depth; ++l)
    if (c.domain[l] < 1)
      return error(moecclInvalidArgument, "config.domain[{}] is {}: a domain has 1 group or more", l, c.domain[l]);
  const ModelProblem model = model_of(comm, c);
  MOECCL_ASSIGN_OR_RETURN(const moecclDomainProblem_t problem, checked(model.problem));
  std::vector<int32_t> sizes(depth, 1);
  if (figures) solve::solve_domains(problem, sizes.data(), answer);
  if (c.domain != nullptr) {
    sizes.assign(c.domain, c.domain + depth);
    if (figures) solve::tell(solve::domain_time(problem, sizes.data()), answer);
  }
  return std::vector<uint32_t>(sizes.begin(), sizes.end());
}

uint64_t hash_of(const algo::Placement& homes, const algo::Domains& domains) {
  uint64_t hash = domains.hash();
  for (const uint32_t owner : homes.owner) hash = hash_combine(hash, owner);
  return hash;
}

// What ranks tell each other before they agree.
struct HybridAnswer {
  uint64_t hash = 0;
  uint32_t domain[MOECCL_MAX_LEVELS] = {};
  int32_t code = moecclSuccess;
  int32_t padding = 0;
};

Status agree(Communicator& comm, const HybridAnswer& mine, const Status& own) {
  MOECCL_ASSIGN_OR_RETURN(const auto all, answers_of(comm, mine, own, "could not create the hybrid placement"));
  for (uint32_t r = 0; r < all.size(); ++r) {
    if (all[r].hash == all[0].hash) continue;
    for (uint32_t l = 0; l < MOECCL_MAX_LEVELS; ++l)
      if (all[r].domain[l] != all[0].domain[l])
        return error(moecclMismatch,
                     "ranks disagree on the domain size of level {}: rank 0 has {}, rank {} has {}; give all ranks the "
                     "same config and profile",
                     l, all[0].domain[l], r, all[r].domain[l]);
    return error(moecclMismatch, "rank {} and rank 0 give different experts to moecclHybridCreate: they must be equal",
                 r);
  }
  return {};
}

}  // namespace

Hybrid::Hybrid(Communicator& comm, algo::Placement homes, std::shared_ptr<const algo::Domains> domains)
    : comm_(comm), homes_(std::move(homes)), domains_(std::move(domains)) {
  const uint32_t rank = comm.rank();
  for (const uint32_t owner : homes_.owner) expert_rank_.push_back(static_cast<int32_t>(owner));
  for (const uint32_t e : homes_.experts_of(rank)) own_.push_back(static_cast<int32_t>(e));
  const algo::Placement seen = domains_->seen_from(rank, homes_);
  for (const uint32_t e : seen.experts_of(rank)) held_.push_back(static_cast<int32_t>(e));
  for (const algo::Domains::Send& send : domains_->sends()) gather_links_ += send.from == rank;
  const uint32_t depth = comm.tree().depth();
  std::vector<uint32_t> n_holders(comm.n_ranks());
  for (uint32_t r = 0; r < comm.n_ranks(); ++r) {
    uint64_t n_held = 0;
    for (const uint32_t home : domains_->held(r, depth)) {
      most_holders_ = std::max(most_holders_, ++n_holders[home]);
      n_held += homes_.n_local(home);
    }
    most_held_ = std::max(most_held_, n_held);
  }
  const algo::Paths paths({algo::PathKind::kHier, depth}, comm.tree(), homes_, domains_.get());
  for (uint32_t r = 0; r < comm.n_ranks(); ++r) token_links_ += paths.edge(rank, r);
}

Status Hybrid::same_ranks(const Communicator& comm) const {
  if (comm.n_ranks() == homes_.n_ranks && comm.tree().hash() == comm_.tree().hash()) {
    if (comm.rank() == comm_.rank()) return {};
    return error(
        moecclInvalidArgument,
        "this process is rank {} in comm and rank {} in the hybrid placement: give a communicator that has the "
        "ranks in the same order",
        comm.rank(), comm_.rank());
  }
  return error(
      moecclInvalidArgument,
      "comm has {} ranks, or another topology than the hybrid placement of {} ranks: give a communicator of the "
      "same ranks",
      comm.n_ranks(), homes_.n_ranks);
}

Result<std::unique_ptr<Hybrid>> Hybrid::create(Communicator& comm, const moecclHybridConfig_t* given) {
  MOECCL_TRY(comm.usable());
  moecclDomainAnswer_t answer{};
  algo::Placement homes;
  std::shared_ptr<const algo::Domains> domains;
  const Status own = [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclHybridConfig_t c, adopt(given, "config"));
    MOECCL_ASSIGN_OR_RETURN(homes, algo::Placement::make(c.n_experts, comm.n_ranks(), c.expert_rank));
    MOECCL_ASSIGN_OR_RETURN(std::vector<uint32_t> sizes, choose_sizes(comm, c, &answer));
    MOECCL_ASSIGN_OR_RETURN(algo::Domains made, algo::Domains::make(comm.tree(), std::move(sizes)));
    domains = std::make_shared<const algo::Domains>(std::move(made));
    return {};
  }();
  HybridAnswer mine;
  mine.code = own.code();
  if (own.ok()) {
    mine.hash = hash_of(homes, *domains);
    std::copy(domains->sizes().begin(), domains->sizes().end(), mine.domain);
  }
  MOECCL_TRY(agree(comm, mine, own));
  std::unique_ptr<Hybrid> hybrid(new Hybrid(comm, std::move(homes), std::move(domains)));
  hybrid->answer_ = answer;
  return hybrid;
}

uint64_t Hybrid::hash() const { return hash_of(homes_, *domains_); }

algo::ExpertExchange Hybrid::exchange_of(uint64_t count, uint32_t element_bytes, bool cuda) const {
  const plan::Shape shape = comm_.selector_for(cuda).shape_of(PlanKey{}, false);
  return {count,
          element_bytes,
          shape.reach,
          comm_.fabric_for(cuda).half_bytes,
          algo::round_trip_bytes(comm_.tree(), *comm_.selector_for(cuda).profile()),
          shape.long_line,
          shape.deterministic,
          cuda ? moeccl::cuda::kMaxSources : 0};
}

Status Hybrid::check_buffers(const void* own, const void* held, uint64_t expert_bytes) const {
  const uint64_t own_bytes = own_.size() * expert_bytes, held_bytes = held_.size() * expert_bytes;
  if (own == nullptr && own_bytes > 0)
    return error(moecclInvalidArgument, "own is NULL: give {} experts of {} bytes", own_.size(), expert_bytes);
  if (held == nullptr && held_bytes > 0)
    return error(moecclInvalidArgument, "held is NULL: give {} experts of {} bytes", held_.size(), expert_bytes);
  const auto* a = static_cast<const std::byte*>(own);
  const auto* b = static_cast<const std::byte*>(held);
  if (own_bytes > 0 && held_bytes > 0 && a < b + held_bytes && b < a + own_bytes)
    return error(moecclInvalidArgument, "own and held overlap: give separate buffers");
  return {};
}

template <class Exchange>
std::vector<Way> Hybrid::ways(moecclOp_t kind, algo::ExpertExchange call) const {
  std::vector<Way> ways;
  for (const auto way : {algo::ExpertExchange::Way::kDirect, algo::ExpertExchange::Way::kStaged}) {
    call.way = way;
    // Two terms have one sum, whichever rank adds them.
    const bool other_bits = kind == moecclOpExpertReduce && most_holders_ > 2;
    ways.push_back({Exchange::name_of(way), Exchange::applies(kind, way, call.reach, call.deterministic),
                    [this, call]() -> Result<algo::WholeRows> {
                      MOECCL_ASSIGN_OR_RETURN(const Exchange exchange, Exchange::make(*domains_, homes_, call));
                      return whole_blocks(exchange.build_all());
                    },
                    other_bits ? static_cast<uint32_t>(way) : 0});
  }
  return ways;
}

template <class Exchange>
Result<Exchange> Hybrid::make(algo::ExpertExchange call, const char* name) const {
  call.way = Exchange::way_of(name);
  return Exchange::make(*domains_, homes_, call);
}

template <class Exchange>
WayOrder Hybrid::order(moecclOp_t kind, const algo::ExpertExchange& call, bool cuda, bool decides) const {
  const Selector& selector = comm_.selector_for(cuda);
  // As ExpertPlans::order(): the hash of the homes would make each new placement a class of its own.
  uint64_t problem = hash_combine(static_cast<uint64_t>(kind), homes_.n_experts());
  for (const uint32_t size : domains_->sizes()) problem = hash_combine(problem, size);
  problem = hash_combine(problem, static_cast<uint64_t>(std::bit_width(most_held_)));
  problem = hash_combine(problem, static_cast<uint64_t>(std::bit_width(call.count * call.element_bytes)));
  const uint64_t most_bytes = cuda ? 0 : most_held_ * call.count * call.element_bytes;
  return in_order(selector, comm_.n_ranks() == 1 ? "" : selector.forced(kind), {problem, most_bytes, decides},
                  ways<Exchange>(kind, call));
}

template <class Exchange>
Status Hybrid::obeys_force(moecclOp_t kind, const algo::ExpertExchange& call, bool cuda) const {
  const std::string& forced = comm_.selector_for(cuda).forced(kind);
  if (forced.empty() || comm_.n_ranks() == 1) return {};
  for (const Way& way : ways<Exchange>(kind, call))
    if (way.name == forced) return way.applies.ok() ? make<Exchange>(call, way.name).status() : way.applies;
  return {};
}

template <class Exchange>
Status Hybrid::prepare(std::shared_ptr<PlanSlot>& last, moecclOp_t kind, const void* in, void* out, uint64_t count,
                       moecclDataType_t type, exec::Operation& op) {
  const auto element_bytes = static_cast<uint32_t>(moecclTypeSize(type));
  const uint64_t expert_bytes = count * element_bytes;
  Communicator::Direct direct{own_.size() * expert_bytes, held_.size() * expert_bytes};
  if (kind == moecclOpExpertReduce) std::swap(direct.a_bytes, direct.b_bytes);
  MOECCL_ASSIGN_OR_RETURN(op.runner, comm_.place(in, out, direct));
  const bool cuda = op.on_device();
  const auto make = [&]() -> Result<std::shared_ptr<PlanSlot>> {
    const algo::ExpertExchange call = exchange_of(count, element_bytes, cuda);
    const WayOrder order = this->order<Exchange>(kind, call, cuda, true);
    // The slot may outlive this object, because another one of the same domains may use it.
    const auto build = [&comm = comm_, homes = homes_, domains = domains_, kind,
                        call](const char* name) -> Result<std::shared_ptr<PlanSlot>> {
      algo::ExpertExchange way = call;
      way.way = Exchange::way_of(name);
      MOECCL_ASSIGN_OR_RETURN(const Exchange exchange, Exchange::make(*domains, homes, way));
      MOECCL_TRY(prove_if_asked(comm.n_ranks(), kind, name, [&] {
        return algo::prove_blocks(exchange.build_all(), algo::expected_exchange(exchange));
      }));
      return Selector::slot_of({kind, 0, call.count, call.element_bytes, false},
                               {exchange.build(comm.rank()), exchange.chunking(), exchange.name(), exchange.hash()});
    };
    MOECCL_ASSIGN_OR_RETURN(std::shared_ptr<PlanSlot> slot, make_first(order.as_next(), build));
    order.enter(*slot, [build](const PlanSlot&, const char* name) { return build(name); });
    if (const Status follows = obeys_force<Exchange>(kind, call, cuda); !follows.ok())
      warn_of_force(comm_.selector_for(cuda), kind, hash(), expert_bytes, follows, slot->choice.algorithm);
    return slot;
  };
  MOECCL_ASSIGN_OR_RETURN(const std::shared_ptr<PlanSlot> slot,
                          comm_.selector_for(cuda).only({kind, 0, count, element_bytes, false}, hash(), make));
  {
    const std::lock_guard lock(mutex_);
    last = slot;
  }
  op.signature.op = kind;
  op.signature.type = type;
  op.signature.count = count;
  op.input = in;
  op.output = out;
  op.element_bytes = element_bytes;
  comm_.attach(op, slot, 0, false);
  return {};
}

// Checks the size of one expert.
static Status check_expert_bytes(uint64_t expert_bytes) {
  if (expert_bytes <= kMostExpertBytes) return {};
  return error(moecclInvalidArgument, "expert_bytes is {}: give the bytes of one expert, at most 2^40", expert_bytes);
}

Status Hybrid::prepare_gather(const void* own, void* held, uint64_t expert_bytes, exec::Operation& op) {
  MOECCL_TRY(comm_.usable());
  MOECCL_TRY(check_expert_bytes(expert_bytes));
  MOECCL_TRY(check_buffers(own, held, expert_bytes));
  return prepare<algo::ExpertGather>(gathered_, moecclOpExpertGather, own, held, expert_bytes, moecclUint8, op);
}

Status Hybrid::prepare_reduce(const void* held, void* own, uint64_t count, moecclDataType_t type, exec::Operation& op) {
  MOECCL_TRY(comm_.usable());
  const size_t element_bytes = moecclTypeSize(type);
  if (element_bytes == 0)
    return error(moecclInvalidArgument, "type is {}: give a moecclDataType_t", static_cast<int>(type));
  if (count > kMostExpertBytes / element_bytes)
    return error(moecclInvalidArgument, "count is {}: give the elements of one expert, at most 2^40 bytes", count);
  MOECCL_TRY(check_buffers(own, held, count * element_bytes));
  return prepare<algo::ExpertReturn>(returned_, moecclOpExpertReduce, held, own, count, type, op);
}

double Hybrid::measured_ns(const std::shared_ptr<PlanSlot>& last) const {
  const std::lock_guard lock(mutex_);
  return last == nullptr ? 0 : static_cast<double>(last->measured.ns.load(std::memory_order_relaxed));
}

Status Hybrid::info(moecclHybridInfo_t* out) const {
  MOECCL_TRY(check_out(out, "info"));
  moecclHybridInfo_t info{};
  info.n_levels = static_cast<int32_t>(domains_->sizes().size());
  for (size_t l = 0; l < domains_->sizes().size(); ++l) info.domain[l] = static_cast<int32_t>(domains_->sizes()[l]);
  info.n_own = static_cast<int32_t>(own_.size());
  info.n_held = static_cast<int32_t>(held_.size());
  info.own_experts = own_.data();
  info.held_experts = held_.data();
  info.gather_links = static_cast<int32_t>(gather_links_);
  info.token_links = static_cast<int32_t>(token_links_);
  info.before_us = answer_.before_us;
  info.after_us = answer_.after_us;
  info.backward_us = answer_.backward_us;
  info.return_us = answer_.return_us;
  info.codec_us = answer_.codec_us;
  info.all_gather_us = answer_.all_gather_us;
  info.all_to_all_us = answer_.all_to_all_us;
  info.measured_gather_us = measured_ns(gathered_) / 1e3;
  give(info, out);
  return {};
}

template <class Exchange>
Result<std::string> Hybrid::explain_plan(moecclOp_t kind, uint64_t count, uint32_t element_bytes,
                                         double measured) const {
  const algo::ExpertExchange call = exchange_of(count, element_bytes, false);
  const WayOrder order = this->order<Exchange>(kind, call, false, false);
  MOECCL_ASSIGN_OR_RETURN(const Exchange chosen,
                          make_first(order.as_now(), [&](const char* name) { return make<Exchange>(call, name); }));
  const WaysPage page = page_of(comm_.selector(), ways<Exchange>(kind, call), chosen.name());
  const std::string why = why_chosen(comm_.selector(), kind, chosen.name(), obeys_force<Exchange>(kind, call, false),
                                     order, "for these domains");
  return plan::explain(
      {page.plan, comm_.tree(), page.cost, comm_.rank(), why, page.candidates, measured, comm_.paced()});
}

Result<std::string> Hybrid::explain(uint64_t expert_bytes) const {
  MOECCL_TRY(check_expert_bytes(expert_bytes));
  std::string page = "expert domains";
  for (size_t l = 0; l < domains_->sizes().size(); ++l)
    page += format("{} {} of level {}", l == 0 ? ":" : ",", domains_->sizes()[l], comm_.tree().levels[l].name);
  page += format("; this rank owns {} experts and holds {}\n", own_.size(), held_.size());
  if (answer_.after_us > 0)
    page += format("stream model: {} {} (AllGather {}, both AlltoAlls {}); plain expert parallelism {}\n",
                   plan::time_text(answer_.after_us * 1e3), answer_.backward_us > 0 ? "a step" : "an iteration",
                   plan::time_text(answer_.all_gather_us * 1e3), plan::time_text(answer_.all_to_all_us * 1e3),
                   plan::time_text(answer_.before_us * 1e3));
  if (answer_.backward_us > 0)
    page += format("  backward: both AlltoAlls {}, gradients to their owners {}; codec {}\n",
                   plan::time_text(answer_.backward_us * 1e3), plan::time_text(answer_.return_us * 1e3),
                   plan::time_text(answer_.codec_us * 1e3));
  MOECCL_ASSIGN_OR_RETURN(const std::string there, explain_plan<algo::ExpertGather>(moecclOpExpertGather, expert_bytes,
                                                                                    1, measured_ns(gathered_)));
  MOECCL_ASSIGN_OR_RETURN(const std::string back,
                          explain_plan<algo::ExpertReturn>(moecclOpExpertReduce, expert_bytes / sizeof(float),
                                                           sizeof(float), measured_ns(returned_)));
  return page + there + "\n" + back;
}

}  // namespace moeccl::comm
