// SPDX-License-Identifier: Apache-2.0
// Gradients that return to the owners of their experts compressed, with error feedback: the contract of
// moeccl/gradient.h without its handles.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/codec.h"
#include "moeccl/gradient.h"
#include "src/comm/cuda_stream.h"
#include "src/exec/cuda/cuda_gradients.h"
#include "src/moe/hybrid.h"

namespace moeccl::comm {

class GradientReturn {
 public:
  // This call is collective on `comm`, which must outlive the result.
  static Result<std::unique_ptr<GradientReturn>> create(const Hybrid& hybrid, Communicator& comm,
                                                        const moecclGradientReturnConfig_t* config);
  ~GradientReturn();  // waits for calls on streams
  // The end waits only for a while for work on CUDA streams, which may stand behind other work there.
  void let_go_of_streams() { lets_go_ = true; }

  // A null stream is the calling thread.
  Status reduce(int layer, const void* held, void* own, Stream* stream);
  Status reset(int layer);
  Status info(int layer, moecclGradientReturnInfo_t* info);

 private:
  // A gradient that this rank computes for another one.
  struct Foreign {
    uint32_t owner = 0;
    size_t held = 0;       // its index among the held experts
    size_t remainder = 0;  // and among those that have a remainder
  };
  struct Layer {
    std::vector<float> remainders;  // [n_remainders][count]
  };
  // The buffers of one call, which later calls reuse. On CUDA memory, device_ has those of each layer.
  struct Flight {
    size_t layer = 0;
    const std::byte* held = nullptr;
    std::byte* own = nullptr;
    std::vector<std::byte> sent, arrived;  // encoded; `sent` in the order of foreign_, `arrived` by rank
    std::vector<std::byte> sum;            // [count] gradient plus remainder; then what was sent of it
    exec::Operation exchange;
  };
  // A call's hold on its flight, which it gives back at its end, even if its work never runs.
  class Lease {
   public:
    Lease(GradientReturn& of, std::unique_ptr<Flight> flight);
    ~Lease();
    Flight& flight() { return *flight_; }

   private:
    GradientReturn& of_;
    std::unique_ptr<Flight> flight_;
  };

  GradientReturn(const Hybrid& hybrid, Communicator& comm, const moecclGradientReturnConfig_t& config);
  void lay_out();  // what comes from whom
  Status allocate(size_t n_layers, bool on_device);
  Status check_layer(int layer) const;
  Status check_kind(const void* held, const void* own) const;
  std::shared_ptr<Lease> lease();
  std::unique_ptr<Flight> make_flight() const;
  Status prepare_exchange(const void* sent, void* arrived, size_t layer, exec::Operation& exchange) const;
  // Takes its turn whatever happens, so that the communicator can go on.
  Status run(Flight& flight, uint64_t ticket);
  // All of a call on a CUDA stream, for which it does not wait.
  Status put_on(CudaStream& stream, size_t layer, const void* held, void* own);
  Status before_exchange(Flight& flight) const;
  Status after_exchange(Flight& flight);
  void encode(Flight& flight) const;
  Status decode(const Flight& flight) const;
  // Writes the remainders of what has arrived at the owners.
  void keep_remainders(Flight& flight);
  bool exact() const { return codec_.ratio <= 1; }
  uint64_t whole() const { return codec_.count * moecclTypeSize(codec_.type); }
  uint64_t sent_bytes() const;
  uint64_t received_bytes() const;

  Communicator& comm_;
  Hybrid hybrid_;  // a copy, so that the caller may destroy its own
  kernels::CodecShape codec_;
  uint64_t expert_bytes_ = 0;
  std::vector<Foreign> foreign_;                                     // by owner, then by expert
  std::vector<size_t> own_held_;                                     // the index of each own expert among the held ones
  std::vector<size_t> send_bytes_, send_at_, recv_bytes_, recv_at_;  // of each rank
  std::vector<Layer> layers_;
  std::vector<std::byte> zeros_;                 // [count]: the shared expert of gradients
  std::unique_ptr<exec::CudaGradients> device_;  // null: gradients and remainders are in host memory
  bool lets_go_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t n_flying_ = 0;  // guarded by mutex_, as is spare_
  std::vector<std::unique_ptr<Flight>> spare_;
};

}  // namespace moeccl::comm
