// SPDX-License-Identifier: Apache-2.0
// MoE layers and routings over a MoeHost: the contract of moeccl/moe.h without its handles.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "src/comm/stream.h"
#include "src/exec/cuda/cuda_routing.h"
#include "src/exec/cuda/tables/cuda_tables.h"
#include "src/exec/cuda/tables/row_tables.h"
#include "src/moe/moe_config.h"
#include "src/moe/moe_host.h"
#include "src/routing/expert_map.h"
#include "src/select/race.h"
#include "src/select/routing_price.h"

namespace moeccl::comm {

// A candidate of a layer on this rank, with its programs.
struct MoeCandidate {
  // `seen` is MoeLayer::placement(), which must outlive this object.
  MoeCandidate(const MoeConfig& config, const algo::Placement& seen, const plan::LevelTree& tree,
               algo::MoeAlgorithm algorithm, uint32_t rank, const GrantedStaging& granted);
  // Returns the staging that its operations use, wherever they run.
  uint64_t staging_bytes(const MoeConfig& config) const {
    return std::max(slots.staging_bytes(config), algo::moe_staging_bytes(config.shape, on_kernel.shape, kernel_rows));
  }
  std::string name;
  algo::Paths paths;
  MoeSlots slots;
  uint64_t kernel_rows;  // of a slot on the persistent kernel; 0: there is none, or too little staging
  algo::RankPaths rank;
  algo::RowWays ways;
  std::optional<algo::RowWays> returns;  // what combine returns, where that is not what dispatch sends
  struct Programs {
    algo::MoePlanShape shape;
    plan::Program dispatch, combine;
    uint64_t dispatch_hash = 0, combine_hash = 0;
  };
  Programs steps, on_kernel;  // on_kernel: empty without a kernel

 private:
  Programs build(const MoeConfig& config, const plan::LevelTree& tree, const algo::MoePlanShape& shape) const;
};

// A dispatch or combine by a candidate's plan, without its buffers, its lists and what the communicator knows.
struct RowsCall {
  moecclOp_t kind = moecclOpDispatch;
  bool weighted = false;
  bool on_kernel = false;
  uint32_t n_chunks = 1;
  uint64_t mark = 0;  // ranks that pass different marks get an error before rows move
};
std::unique_ptr<exec::Operation> rows_operation(const MoeConfig& config, const MoeCandidate& plan,
                                                const RowsCall& call);
void bind_lists(exec::Operation& op, const algo::RoutingTables& tables, bool weighted);
Status needs_buffer(const char* what, const char* name, const void* buffer, uint64_t rows);
struct RowBuffer {
  const char* name = "";
  const void* at = nullptr;
  uint64_t rows = 0, row_bytes = 0;
  bool written = false;
};
// Returns an error if a buffer is NULL, or if one that the call writes overlaps another one: rows arrive while others
// are still to be sent.
Status check_buffers(const char* what, std::initializer_list<RowBuffer> buffers);

// The time that one update's operations took on this rank.
struct MoeStep {
  uint64_t number = 0;  // of the update; 0: no update
  uint64_t n_tokens = 0;
  size_t candidate = 0;
  std::vector<double> prices_us;  // [candidates]
  double took_us = 0;             // dispatch and combine together; 0: one of them did not run
};

class MoeLayer {
 public:
  // This call is collective. The host must outlive the layer. If the config leaves the algorithm open, the layer runs
  // `forced`, unless that is empty or the layer cannot run it. All ranks hear of a rank's own `refusal`.
  static Result<std::unique_ptr<MoeLayer>> create(MoeHost& host, const moecclMoeConfig_t* config,
                                                  std::shared_ptr<const algo::Domains> domains = nullptr,
                                                  const std::string& forced = {}, const Status& refusal = {});

  MoeHost& host() const { return host_; }
  const MoeConfig& config() const { return config_; }
  // Returns why the forced algorithm does not run. Success: it does, or none was forced.
  const Status& follows_force() const { return follows_force_; }
  // Returns the plans for which the staging is too small; or an empty text.
  const std::string& left_out() const { return left_out_; }
  // The rank that computes each expert for this rank's tokens: its owner, or the rank that holds a copy in this rank's
  // domains.
  const algo::Placement& placement() const { return placement_; }
  const algo::CanonicalOrder& order() const { return order_; }
  const algo::RowWays& into_experts() const { return into_experts_; }
  // Null: experts stay where they were at creation. With a map, every expert number in the layer is a slot.
  const std::shared_ptr<algo::ExpertMap>& map() const { return map_; }
  void take_map(std::shared_ptr<algo::ExpertMap> map) { map_ = std::move(map); }
  const std::vector<std::unique_ptr<MoeCandidate>>& candidates() const { return candidates_; }
  // Hand out device tables to a routing and take them back. They are not freed in between, because freeing memory waits
  // for the device, where a peer's kernel may wait for this rank. take_tables() returns null if there is no persistent
  // kernel, on any rank.
  Result<std::unique_ptr<exec::RowTables>> take_tables();
  void give_back(std::unique_ptr<exec::RowTables> tables);
  bool has_tables() const;
  // Returns free tables for stream updates with the candidate's plan, or null after freeing those of other plans.
  std::unique_ptr<exec::CudaTables> take_cuda_tables(size_t candidate);
  void give_back(std::unique_ptr<exec::CudaTables> tables);
  // Returns the guesses for the next update. With one candidate or without trials, they leave prices as they are.
  std::vector<float> guesses(uint64_t n_tokens) const;
  size_t pick(std::span<const double> prices_us, std::span<const float> guesses) const;
  // Keep the last update whose operations have run, of any of the layer's routings, until ranks exchange their times.
  void keep_step(MoeStep step);
  MoeStep take_step();
  void note_step(const MoeStep& step, double took_us);
  // Returns the most rows of Output that any routing gives this rank.
  uint64_t most_rows() const;
  // Returns the routing for choices in device memory; creates it on the first call.
  Result<exec::CudaRouting*> cuda_routing(exec::StreamEngine& engine);
  // Returns the device and page-locked memory that the layer holds in addition to its routings; with `takes`, as it is
  // once a routing has taken a set of free tables.
  uint64_t device_bytes(bool takes);

 private:
  MoeLayer(MoeHost& host, MoeConfig config)
      : host_(host),
        config_(std::move(config)),
        placement_(config_.domains ? config_.domains->seen_from(host.rank(), config_.placement) : config_.placement),
        order_(host.tree(), placement_),
        into_experts_(algo::RowWays::into_experts(placement_, config_.shape.expert_major)) {}

  MoeHost& host_;
  MoeConfig config_;
  Status follows_force_;
  std::string left_out_;
  algo::Placement placement_;
  algo::CanonicalOrder order_;
  algo::RowWays into_experts_;
  std::shared_ptr<algo::ExpertMap> map_;
  std::vector<std::unique_ptr<MoeCandidate>> candidates_;
  std::unique_ptr<exec::CudaRouting> cuda_routing_;
  std::mutex tables_mutex_;
  mutable std::mutex race_mutex_;
  std::optional<Race> race_;
  MoeStep last_step_;
  std::vector<std::unique_ptr<exec::RowTables>> free_tables_;
  std::vector<std::unique_ptr<exec::CudaTables>> free_cuda_tables_;
};

class MoeRouting {
 public:
  explicit MoeRouting(MoeLayer& layer) : layer_(layer) {}  // empty until update() succeeds
  ~MoeRouting() {
    wait_for_readers();
    keep_step();
    layer_.give_back(std::move(cuda_tables_));
    layer_.give_back(std::move(device_tables_));
  }

  MoeLayer& layer() const { return layer_; }
  // This call is collective and blocks. Its first exchange ends all operations that this rank still has in flight, so
  // that tables may change. topk_index may be in device memory of the host's engine; topk_weight may then be in any
  // memory. A rank that cannot read its choices gives the reason as `refusal`, so that its peers hear it.
  Status update(const int32_t* topk_index, const float* topk_weight, uint64_t n_tokens, const Status& refusal = {});
  // Updates in the stream's order, with the plan of the last update(). It waits for nothing, except that its first call
  // for a plan is collective and allocates memory.
  Status update_on_stream(const exec::StreamChoices& choices, Stream* stream);
  Status dispatch(const void* in, void* out, Stream* stream);
  Status dispatch_scaled(const void* in, void* out, const exec::Operation::Scales& scales, Stream* stream);
  Status combine(const void* in, void* out, Stream* stream);
  Status dispatch_backward(const void* grad_out, void* grad_in, Stream* stream);
  struct CombineGradients {
    const void* grad_out = nullptr;
    void* grad_in = nullptr;
    const void* in = nullptr;  // the input that combine got; only with grad_weight
    float* grad_weight = nullptr;
  };
  // Blocks if grad_weight is given.
  Status combine_backward(const CombineGradients& g, Stream* stream);
  Status info(moecclRoutingInfo_t* info) const;
  // Returns what device memory knows of this routing, also after updates. Fails with moecclUnsupported without the
  // persistent kernel.
  Status device_info(moecclRoutingDeviceInfo_t* info) const;
  Result<std::string> explain() const;
  uint64_t memory_bytes() const;

 private:
  friend class MoeReplacement;  // runs its own steps over this routing (moe_replace.h)
  struct Hello;
  struct Agreement;
  // Registers `reader`, whose work reads this routing from now on: update() and the destructor wait for its end.
  void read_by(const std::shared_ptr<HostStream>& reader);
  void wait_for_readers();
  Status assign(const algo::TopK& topk);
  Status assign_to_slots(const algo::TopK& topk);
  // Tells the layer's map about a successful update.
  void note_routing(const int32_t* topk_index);
  Status check_arguments(const int32_t* topk_index, uint64_t n_tokens) const;
  Status greet(const Status& own);
  Status choose(const std::byte* greetings, size_t bytes);
  Status agree_on_weights(std::span<const Hello> hellos);
  // Hands the times of the last update's operations to the layer. None of the operations may be in flight.
  void keep_step();
  Status exchange_records();
  Status exchange_at_once(const Status& own, size_t block);
  Status exchange_sized(const Status& own);
  Status expect_records(const Status& own, std::span<const uint64_t> sizes);
  // Returns the most bytes of records that a rank with so many tokens sends to one rank.
  size_t most_record_bytes(uint64_t tokens) const;
  Status write_records();
  Status read_received(Agreement* mine);
  void note_step(const MoeStep& step, std::span<const Agreement> all);
  Status agree();
  void cut_for_host();
  Status update_all(const int32_t* topk_index, const float* topk_weight, uint64_t n_tokens, const Status& refusal);
  Status keep_captured(std::span<const Hello> hellos);
  Status bring_tables();
  Status upload_tables();
  Status all_ready(const Status& own, const char* what);
  std::vector<std::byte> info_for_device() const;
  Status has_device_tables() const;
  Status check_stream_choices(const exec::StreamChoices& choices) const;
  Status prepare_stream_updates(driver::cuda::Context context, bool captured);
  Status usable(const char* what) const;
  Status on_host(const char* what) const;  // usable(), and the arrays are on the host
  // The tokens and rows that a call needs room for: the last update's, or the most possible if only the device knows.
  uint64_t tokens_here() const { return on_device_ ? layer_.config().shape.max_tokens : own_.n_tokens; }
  uint64_t rows_here() const { return on_device_ ? layer_.most_rows() : tables_.n_rows(); }
  Status needs_elements(const char* what) const;
  Status run(moecclOp_t kind, bool weighted, const void* in, void* out, Stream* stream,
             exec::Operation::Measured& measured, const exec::Operation::Scales* scales = nullptr);
  // The backward of a combine of `n_rows` rows, which `dispatch` brings back, times their weights if `weighted`.
  Status combine_gradients(const char* what, const CombineGradients& g, uint64_t n_rows, Stream* stream,
                           const std::function<Status(bool weighted)>& dispatch);
  Result<bool> dots_on_device(const char* what, const CombineGradients& g) const;
  Status dot_and_scale(const CombineGradients& g, bool on_device, std::vector<float>& dots) const;
  Status return_dots(const std::vector<float>& dots, float* grad_weight);
  void fill_levels(moecclRoutingInfo_t& info) const;
  const char* why_chosen() const;
  std::string hiermoe_text() const;

  MoeLayer& layer_;
  bool ready_ = false;
  uint64_t version_ = 0;   // counts updates
  bool weighted_ = false;  // true if any rank with tokens gave weights
  algo::OwnChoices own_;
  // Only for a layer with a map: the results of the last update, by expert.
  uint64_t map_version_ = 0;
  std::vector<int32_t> slots_, local_experts_, drop_counts_;
  exec::StreamEngine* engine_ = nullptr;  // set during an update with choices in device memory
  exec::CudaRouting* cuda_ = nullptr;     // set together with engine_
  std::vector<uint64_t> tokens_of_;       // [n_ranks]
  std::vector<algo::LevelCount> counts_;  // scratch
  std::vector<std::byte> gathered_;       // scratch
  std::vector<algo::MoePrice> prices_;    // by candidate
  std::vector<float> guesses_;            // by candidate, see Race
  MoeStep step_;                          // of the last update
  size_t chosen_ = 0;
  uint64_t number_ = 0;  // MoeHost::next_number() of the last update
  algo::RecordWriter writer_;
  std::vector<uint32_t> received_;  // records of all ranks
  std::vector<size_t> received_bytes_;
  // Its lists are cut for the persistent kernel where there is one, until the first operation that needs them cut for
  // the host's slots.
  algo::RoutingTables tables_;
  uint32_t host_chunks_ = 1, kernel_chunks_ = 1;  // as many as the slots of each need
  // For the persistent kernel; null without one.
  std::unique_ptr<exec::RowTables> device_tables_;
  // For updates on a stream, whose lists and counts only the device knows.
  std::unique_ptr<exec::CudaTables> cuda_tables_;
  bool on_device_ = false;  // the last update was on a stream
  // A graph holds an operation on this routing, so updates keep its plan and keep to weights or to none.
  bool captured_ = false, captured_weighted_ = false;
  exec::Operation::Measured measured_dispatch_, measured_combine_, measured_backward_;
  std::vector<std::weak_ptr<HostStream>> readers_;
};

}  // namespace moeccl::comm
