// SPDX-License-Identifier: Apache-2.0
#include "src/moe/moe_layer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/table.h"
#include "src/base/adopt.h"
#include "src/base/hash.h"
#include "src/base/log.h"
#include "src/comm/collective.h"
#include "src/exec/cuda/persistent_kernel.h"

namespace moeccl::comm {

MoeCandidate::MoeCandidate(const MoeConfig& config, const algo::Placement& seen, const plan::LevelTree& tree,
                           algo::MoeAlgorithm algorithm, uint32_t self, const GrantedStaging& granted)
    : name(config.shape.by_choice ? kOrderedName : algorithm.name()),
      paths(algorithm, tree, config.placement, config.domains.get()),
      slots(config, paths, granted.host),
      kernel_rows(kernel_slot_rows(config, paths, granted.kernel)),
      rank(paths, tree, seen, self),
      ways(paths, tree, seen, self),
      steps(build(config, tree, slots.plan)) {
  if (algo::returns_fewer(algorithm, config.shape)) returns = ways.shared_by_rank();
  if (kernel_rows == 0) return;
  algo::MoePlanShape batched = algo::moe_plan_shape(paths, config.shape.expert_major, kernel_rows);
  batched.batched = true;
  on_kernel = build(config, tree, batched);
}

MoeCandidate::Programs MoeCandidate::build(const MoeConfig& config, const plan::LevelTree& tree,
                                           const algo::MoePlanShape& shape) const {
  const auto hash = [&](moecclOp_t op) { return algo::moe_plan_hash(op, paths, tree, config.placement, shape); };
  return {shape, algo::build_dispatch(paths, rank, shape), algo::build_combine(paths, rank, shape),
          hash(moecclOpDispatch), hash(moecclOpCombine)};
}

namespace {

// The fields that an error can name, as the layer understands them; the hash covers all fields.
constexpr const char* kFields[] = {"hidden_bytes",     "type",       "top_k",    "n_experts",        "max_tokens",
                                   "layout",           "align_rows", "capacity", "memory_cap_bytes", "scale_bytes",
                                   "scaled_row_bytes", "trials"};
struct LayerAnswer {
  uint64_t hash = 0;
  uint64_t staging = 0;
  int64_t fields[std::size(kFields)] = {};
  int32_t code = moecclSuccess;
  int32_t padding = 0;
};

LayerAnswer answer_of(const MoeConfig& config, const moecclMoeConfig_t& given, uint64_t staging) {
  return {config.hash(),
          staging,
          {static_cast<int64_t>(given.hidden_bytes), static_cast<int64_t>(given.type), given.top_k, given.n_experts,
           static_cast<int64_t>(given.max_tokens), static_cast<int64_t>(given.layout), config.shape.align_rows,
           given.capacity, static_cast<int64_t>(config.memory_cap), static_cast<int64_t>(config.scale_bytes),
           static_cast<int64_t>(config.scaled_row_bytes), config.trials ? 0 : -1}};
}

// Checks that what the config told moecclMoeCheck about a communicator is true of this one.
Status agree_with_communicator(const moecclMoeConfig_t& given, const MoeHost& host) {
  if (given.staging_bytes > 0 && granted_staging(given.staging_bytes) != host.staging_bytes())
    return error(moecclInvalidArgument,
                 "config.staging_bytes is {}, but the communicator has {}: give 0, or the communicator's in its "
                 "moecclConfig_t",
                 given.staging_bytes, 2 * host.staging_bytes());
  if (given.deterministic == 1 && !host.deterministic())
    return error(moecclInvalidArgument,
                 "config.deterministic is 1, but the communicator was created without: give 0, or set deterministic in "
                 "its moecclConfig_t");
  return {};
}

Status agree(const std::vector<LayerAnswer>& all, uint32_t rank) {
  MOECCL_TRY(compare("moecclMoeCreate", kFields, all));
  for (uint32_t r = 0; r < all.size(); ++r) {
    if (all[r].hash == all[0].hash && all[r].staging == all[0].staging) continue;
    return error(moecclMismatch, "rank {} and rank 0 give different {} to moecclMoeCreate (this is rank {}): {}", r,
                 all[r].hash != all[0].hash ? "expert placements or algorithms" : "staging sizes", rank,
                 all[r].hash != all[0].hash ? "give equal expert_rank and algorithm, and force alike (moecclPlanForce)"
                                            : "set staging_bytes alike");
  }
  return {};
}

// Leaves the forced algorithm alone in the config, or returns why the layer cannot run it. All ranks come to the same
// answer, because they compare their configs and their staging.
Status follow(const std::string& forced, const MoeHost& host, MoeConfig& config) {
  MoeConfig narrow = config;
  MOECCL_TRY(narrow.narrow_to(forced, host.tree()));
  MOECCL_TRY(fitting(narrow, host.tree(), host.staging_bytes()).status());
  config = std::move(narrow);
  return {};
}

}  // namespace

Result<std::unique_ptr<MoeLayer>> MoeLayer::create(MoeHost& host, const moecclMoeConfig_t* given,
                                                   std::shared_ptr<const algo::Domains> domains,
                                                   const std::string& forced, const Status& refusal) {
  Result<moecclMoeConfig_t> full = adopt(given, "config");
  Result<MoeConfig> config = [&]() -> Result<MoeConfig> {
    // What was refused, such as domains of other ranks, must not be looked at.
    MOECCL_TRY(refusal);
    MOECCL_TRY(full.status());
    return MoeConfig::from(&*full, host.tree(), host.deterministic(), std::move(domains));
  }();
  Status own = config.ok() ? agree_with_communicator(*full, host) : config.status();
  Status follows;
  if (own.ok() && !forced.empty() && leaves_algorithm_open(*full)) {
    follows = follow(forced, host, *config);
    if (!follows.ok()) follows = std::move(follows).with_context(format("{} is forced but does not apply", forced));
  }
  Fitting fit;
  if (own.ok()) {
    auto fits = fitting(*config, host.tree(), host.staging_bytes());
    if (fits.ok())
      fit = std::move(*fits);
    else
      own = fits.status();
  }
  LayerAnswer mine;
  if (own.ok()) mine = answer_of(*config, *full, host.staging_bytes());
  mine.code = own.code();
  MOECCL_ASSIGN_OR_RETURN(const auto all, answers_of(host, mine, own, "could not create the layer"));
  MOECCL_TRY(agree(all, host.rank()));
  std::unique_ptr<MoeLayer> layer(new MoeLayer(host, std::move(*config)));
  layer->follows_force_ = std::move(follows);
  const exec::PersistentKernel* kernel = host.kernel();
  const GrantedStaging granted{host.staging_bytes(), kernel != nullptr ? kernel->half_bytes() : 0};
  layer->left_out_ = std::move(fit.left_out);
  if (host.rank() == 0 && !layer->left_out_.empty())
    log(LogLevel::kWarn, "an MoE layer of {} ranks runs without a plan: {}", host.n_ranks(), layer->left_out_);
  size_t flat = fit.algorithms.size();
  for (const algo::MoeAlgorithm& a : fit.algorithms) {
    if (a.kind == algo::PathKind::kFlat) flat = layer->candidates_.size();
    layer->candidates_.push_back(
        std::make_unique<MoeCandidate>(layer->config_, layer->placement_, host.tree(), a, host.rank(), granted));
  }
  if (layer->candidates_.size() > 1) layer->race_.emplace(layer->candidates_.size(), flat);
  return layer;
}

std::vector<float> MoeLayer::guesses(uint64_t n_tokens) const {
  const std::lock_guard lock(race_mutex_);
  return race_ && config_.trials ? race_->guesses(n_tokens) : std::vector<float>(candidates_.size(), 1.0F);
}

size_t MoeLayer::pick(std::span<const double> prices_us, std::span<const float> guesses) const {
  return race_ ? race_->pick(prices_us, guesses) : 0;
}

void MoeLayer::keep_step(MoeStep step) {
  const std::lock_guard lock(race_mutex_);
  last_step_ = std::move(step);
}

MoeStep MoeLayer::take_step() {
  const std::lock_guard lock(race_mutex_);
  return std::exchange(last_step_, {});
}

void MoeLayer::note_step(const MoeStep& step, double took_us) {
  const std::lock_guard lock(race_mutex_);
  if (race_) race_->note(step.n_tokens, step.candidate, step.prices_us, took_us);
}

void MoeRouting::keep_step() {
  const double dispatch_ns = measured_dispatch_.ns, combine_ns = measured_combine_.ns;
  if (step_.number == 0 || dispatch_ns <= 0 || combine_ns <= 0) return;
  step_.took_us = (dispatch_ns + combine_ns) / 1e3;
  // The backward pass moves the same rows both ways.
  if (layer_.map() != nullptr) layer_.map()->note_step(step_.took_us * (measured_backward_.ns > 0 ? 2 : 1));
  layer_.keep_step(std::exchange(step_, {}));
}

Result<exec::CudaRouting*> MoeLayer::cuda_routing(exec::StreamEngine& engine) {
  {
    const std::lock_guard lock(tables_mutex_);
    if (cuda_routing_ != nullptr) return cuda_routing_.get();
  }
  // An allocation may wait for the device, where a stream may wait for this rank.
  host_.wait_idle();
  exec::CudaRouting::Model s{&config_.shape, &placement_, &order_, &host_.tree(), {}, host_.rank()};
  for (const auto& candidate : candidates_) s.candidates.push_back(&candidate->paths);
  MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<exec::CudaRouting> made, exec::CudaRouting::create(engine, s));
  const std::lock_guard lock(tables_mutex_);
  if (cuda_routing_ == nullptr) cuda_routing_ = std::move(made);
  return cuda_routing_.get();
}

uint64_t MoeLayer::most_rows() const {
  const algo::MoeShape& shape = config_.shape;
  const uint64_t n = config_.placement.n_ranks, local = config_.n_held(host_.rank());
  if (local == 0) return 0;
  const uint64_t kept = shape.capacity > 0 ? std::min<uint64_t>(shape.capacity, shape.max_tokens) : shape.max_tokens;
  if (!shape.expert_major) return n * std::min(shape.max_tokens, local * kept);
  const uint64_t align = shape.align_rows, full = (n * kept + align - 1) / align * align;
  const uint64_t choices = n * shape.max_tokens * std::min<uint64_t>(shape.top_k, local);
  return std::min(local * full, choices + local * (align - 1));
}

Status MoeRouting::usable(const char* what) const {
  if (ready_ && layer_.map() != nullptr && map_version_ == 0)
    return error(moecclInvalidUsage,
                 "{}: the layer was attached to expert swap after the routing's last update: update it first", what);
  if (ready_ && layer_.map() != nullptr && map_version_ != layer_.map()->version())
    return error(moecclInvalidUsage,
                 "{}: experts have changed places since the routing's last update: update it first, and call "
                 "moecclExpertSwapFinish behind the step's last operation",
                 what);
  if (ready_) return {};
  MOECCL_TRY(layer_.host().usable());
  return error(moecclInvalidUsage, "{}: the routing is empty, because its last update failed: update it first", what);
}

Status MoeRouting::needs_elements(const char* what) const {
  const MoeConfig& config = layer_.config();
  const size_t element = moecclTypeSize(config.type);
  if (config.shape.row_bytes % element == 0) return {};
  return error(moecclInvalidArgument,
               "{}: hidden_bytes is {}, not a multiple of the {} bytes of the layer's type: rows cannot be summed",
               what, config.shape.row_bytes, element);
}

Status needs_buffer(const char* what, const char* name, const void* buffer, uint64_t rows) {
  if (buffer || rows == 0) return {};
  return error(moecclInvalidArgument, "{}: {} is NULL: give a buffer of {} rows", what, name, rows);
}

Status check_buffers(const char* what, std::initializer_list<RowBuffer> buffers) {
  for (auto b = buffers.begin(); b != buffers.end(); ++b) {
    MOECCL_TRY(needs_buffer(what, b->name, b->at, b->rows));
    for (auto a = buffers.begin(); a != b; ++a) {
      if (!a->written && !b->written) continue;
      if (!overlap(a->at, a->rows * a->row_bytes, b->at, b->rows * b->row_bytes)) continue;
      return error(moecclInvalidArgument, "{}: {} and {} overlap: give separate buffers", what, a->name, b->name);
    }
  }
  return {};
}

std::unique_ptr<exec::Operation> rows_operation(const MoeConfig& config, const MoeCandidate& plan,
                                                const RowsCall& call) {
  const bool dispatches = call.kind == moecclOpDispatch;
  const uint64_t slot_rows = call.on_kernel ? plan.kernel_rows : plan.slots.slot_rows;
  const MoeCandidate::Programs& programs = call.on_kernel ? plan.on_kernel : plan.steps;
  auto op = std::make_unique<exec::Operation>();
  op->binding = algo::moe_binding(config.shape, call.n_chunks, slot_rows);
  op->signature.op = call.kind;
  // A dispatch without weights moves bytes, so rows may have any length.
  op->signature.type = dispatches && !call.weighted ? moecclUint8 : config.type;
  const uint64_t program_hash = dispatches ? programs.dispatch_hash : programs.combine_hash;
  op->signature.plan = hash_combine(hash_combine(hash_combine(program_hash, call.n_chunks), slot_rows), call.mark);
  op->choice = {dispatches ? &programs.dispatch : &programs.combine, op->binding.chunking, plan.name.c_str(),
                op->signature.plan, program_hash};
  op->element_bytes = op->binding.element_bytes;
  op->grouped = config.shape.grouped;
  return op;
}

void bind_lists(exec::Operation& op, const algo::RoutingTables& tables, bool weighted) {
  if (op.signature.op == moecclOpDispatch) op.binding.rows = tables.dispatch_rows(weighted);
  op.binding.sums = op.signature.op == moecclOpDispatch ? tables.dispatch_sums() : tables.combine_sums(weighted);
}

Status MoeRouting::run(moecclOp_t kind, bool weighted, const void* in, void* out, Stream* stream,
                       exec::Operation::Measured& measured, const exec::Operation::Scales* scales) {
  const MoeConfig& config = layer_.config();
  const MoeCandidate& plan = *layer_.candidates()[chosen_];
  MoeHost::RowBuffers buffers = MoeHost::RowBuffers::of(kind, in, out, tokens_here(), rows_here());
  buffers.tables = device_tables_ != nullptr;
  if (scales != nullptr) buffers.scales = *scales;
  MOECCL_ASSIGN_OR_RETURN(const MoeHost::Place place, layer_.host().place(buffers, stream));
  const bool on_kernel = place.on_kernel();
  if (!on_kernel && !on_device_) cut_for_host();
  const uint32_t n_chunks = !on_kernel ? host_chunks_ : on_device_ ? cuda_tables_->n_chunks() : kernel_chunks_;
  // The mark catches a rank that runs another routing, perhaps of another layer, or a backward pass.
  auto op = rows_operation(config, plan, {kind, weighted, on_kernel, n_chunks, 2 * number_ + (weighted ? 1 : 0)});
  op->rows.in_tables_alone = on_device_;
  if (!on_device_) bind_lists(*op, tables_, weighted);
  if (scales != nullptr) {
    op->scales = *scales;
    op->scales.bytes = static_cast<uint32_t>(config.scale_bytes);
    op->element_bytes = op->binding.element_bytes = static_cast<uint32_t>(config.shape.scaled_bytes);
    op->signature.plan = op->choice.plan_hash = hash_combine(op->signature.plan, config.scale_bytes);
  }
  op->input = in;
  op->output = out;
  op->measured = &measured;
  op->rows.bytes = std::max(tokens_here(), rows_here()) * op->element_bytes;
  if (device_tables_ != nullptr) {
    op->rows.tables = device_tables_->device();
    op->rows.weighted = weighted;
    op->rows.most_bytes = std::max(config.shape.max_tokens, layer_.most_rows()) * op->element_bytes;
  }
  const bool known = captured_;
  Status status = layer_.host().run(std::move(op), place, &captured_);
  if (!known) captured_weighted_ = weighted_;
  return status;
}

Status MoeRouting::dispatch(const void* in, void* out, Stream* stream) {
  MOECCL_TRY(usable("dispatch"));
  const uint64_t row_bytes = layer_.config().shape.row_bytes;
  MOECCL_TRY(
      check_buffers("dispatch", {{"in", in, tokens_here(), row_bytes}, {"out", out, rows_here(), row_bytes, true}}));
  return run(moecclOpDispatch, false, in, out, stream, measured_dispatch_);
}

Status MoeRouting::dispatch_scaled(const void* in, void* out, const exec::Operation::Scales& scales, Stream* stream) {
  MOECCL_TRY(usable("dispatch of scaled rows"));
  const uint64_t row_bytes = layer_.config().scaled_row_bytes, scale_bytes = layer_.config().scale_bytes;
  if (scale_bytes == 0) {
    return error(moecclInvalidUsage,
                 "dispatch of scaled rows: the layer was created with scale_bytes 0: set it in its config");
  }
  MOECCL_TRY(check_buffers("dispatch of scaled rows", {{"in", in, tokens_here(), row_bytes},
                                                       {"in_scales", scales.input, tokens_here(), scale_bytes},
                                                       {"out", out, rows_here(), row_bytes, true},
                                                       {"out_scales", scales.output, rows_here(), scale_bytes, true}}));
  return run(moecclOpDispatch, false, in, out, stream, measured_dispatch_, &scales);
}

Status MoeRouting::combine(const void* in, void* out, Stream* stream) {
  MOECCL_TRY(usable("combine"));
  MOECCL_TRY(needs_elements("combine"));
  const uint64_t row_bytes = layer_.config().shape.row_bytes;
  MOECCL_TRY(
      check_buffers("combine", {{"in", in, rows_here(), row_bytes}, {"out", out, tokens_here(), row_bytes, true}}));
  return run(moecclOpCombine, true, in, out, stream, measured_combine_);
}

Status MoeRouting::dispatch_backward(const void* grad_out, void* grad_in, Stream* stream) {
  MOECCL_TRY(usable("dispatch backward"));
  MOECCL_TRY(needs_elements("dispatch backward"));
  const uint64_t row_bytes = layer_.config().shape.row_bytes;
  MOECCL_TRY(check_buffers("dispatch backward", {{"grad_out", grad_out, rows_here(), row_bytes},
                                                 {"grad_in", grad_in, tokens_here(), row_bytes, true}}));
  return run(moecclOpCombine, false, grad_out, grad_in, stream, measured_backward_);
}

Status MoeRouting::combine_backward(const CombineGradients& g, Stream* stream) {
  return combine_gradients("combine backward", g, rows_here(), stream, [&](bool weighted) {
    return run(moecclOpDispatch, weighted, g.grad_out, g.grad_in, stream, measured_backward_);
  });
}

Status MoeRouting::combine_gradients(const char* what, const CombineGradients& g, uint64_t n_rows, Stream* stream,
                                     const std::function<Status(bool weighted)>& dispatch) {
  MOECCL_TRY(usable(what));
  const algo::MoeShape& shape = layer_.config().shape;
  const bool expert_major = shape.expert_major;
  const bool wants_weights = g.grad_weight != nullptr;  // alike on all ranks, also on those without tokens
  if (wants_weights) MOECCL_TRY(on_host("gradients of the weights"));
  if (expert_major && (weighted_ || wants_weights)) MOECCL_TRY(needs_elements(what));
  const RowBuffer grad_out{"grad_out", g.grad_out, tokens_here(), shape.row_bytes};
  const RowBuffer grad_in{"grad_in", g.grad_in, n_rows, shape.row_bytes, true};
  MOECCL_TRY(check_buffers(what, {grad_out, grad_in}));
  if (wants_weights && !expert_major)
    return error(moecclInvalidArgument,
                 "{}: grad_weight is given, but with moecclLayoutRows the caller applies the weights: pass NULL", what);
  // A weighted dispatch computes in the layer's type. All ranks agree on whether there are weights.
  if (!wants_weights) return dispatch(expert_major && weighted_);
  MOECCL_TRY(check_buffers(what, {grad_out,
                                  grad_in,
                                  {"in", g.in, n_rows, shape.row_bytes},
                                  {"grad_weight", g.grad_weight, tokens_here(), shape.top_k * sizeof(float), true}}));
  MOECCL_ASSIGN_OR_RETURN(const bool on_device, dots_on_device(what, g));
  MOECCL_TRY(layer_.host().needs_host(stream));
  MOECCL_TRY(dispatch(false));
  // The products need the rows as they were sent, so weights are applied only now. They go to the ranks that brought
  // the tokens, whose gates chose. A blocking exchange of the communicator comes after everything on its streams, and
  // so waits for the dispatch.
  if (stream) {
    gathered_.resize(layer_.host().n_ranks());
    const std::byte mine{};
    MOECCL_TRY(layer_.host().all_gather(&mine, 1, gathered_.data()));
  }
  std::vector<float> dots;
  MOECCL_TRY(dot_and_scale(g, on_device, dots));
  return return_dots(dots, g.grad_weight);
}

// Returns whether dot_and_scale() runs on the device. A rank without rows may pass any pointers.
Result<bool> MoeRouting::dots_on_device(const char* what, const CombineGradients& g) const {
  if (rows_here() == 0) return false;
  return layer_.host().on_device(what, {{"grad_in", g.grad_in}, {"in", g.in}});
}

constexpr size_t kDotBatch = 4;

// Fills `dots` by (origin, token, expert) of each local choice, and multiplies the rows of grad_in by their weights.
Status MoeRouting::dot_and_scale(const CombineGradients& g, bool on_device, std::vector<float>& dots) const {
  const MoeConfig& config = layer_.config();
  const std::vector<uint32_t>& rows = tables_.choice_row;
  dots.resize(rows.size());
  return layer_.host().with_kernels(on_device, [&](const kernels::KernelTable& table) {
    // On the host, a few rows at a time are scaled while they are still in the cache.
    const size_t batch = on_device ? std::max<size_t>(1, rows.size()) : kDotBatch;
    std::vector<float> weights(std::min(batch, rows.size()));
    kernels::DotRowsArgs dot;
    dot.a = g.grad_in;
    dot.b = g.in;
    dot.row_elements = config.shape.row_bytes / moecclTypeSize(config.type);
    kernels::ScaleRowsArgs scale;
    scale.rows.dst = g.grad_in;
    scale.rows.src = g.grad_in;
    scale.rows.row_bytes = config.shape.row_bytes;
    scale.weights = weights.data();
    for (size_t i = 0; i < rows.size(); i += batch) {
      dot.out = dots.data() + i;
      dot.a_index = dot.b_index = rows.data() + i;
      dot.count = std::min(batch, rows.size() - i);
      table.dot_rows[config.type](dot);
      if (!tables_.weighted()) continue;
      scale.rows.dst_index = scale.rows.src_index = dot.a_index;
      scale.rows.count = dot.count;
      for (size_t k = 0; k < dot.count; ++k) weights[k] = tables_.choice_weight[dot.a_index[k]];
      table.scale_rows[config.type](scale);
    }
  });
}

Status MoeRouting::return_dots(const std::vector<float>& dots, float* grad_weight) {
  const uint32_t n = layer_.host().n_ranks();
  std::vector<size_t> send_bytes(n), recv_bytes(n);
  for (uint32_t r = 0; r < n; ++r) {
    send_bytes[r] = (tables_.choice_first[r + 1] - tables_.choice_first[r]) * sizeof(float);
    recv_bytes[r] = writer_.choices_of(r).size() * sizeof(float);
  }
  std::vector<float> products(own_.choice.size());
  MOECCL_TRY(layer_.host().all_to_all_v(dots.data(), send_bytes.data(), products.data(), recv_bytes.data()));
  std::fill_n(grad_weight, own_.n_tokens * layer_.config().shape.top_k, 0.0f);
  size_t i = 0;
  for (uint32_t r = 0; r < n; ++r)
    for (const uint32_t position : writer_.choices_of(r)) grad_weight[own_.choice[position]] = products[i++];
  return {};
}

}  // namespace moeccl::comm
