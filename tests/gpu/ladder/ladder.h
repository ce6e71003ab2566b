// SPDX-License-Identifier: Apache-2.0
// The ladder checks, rung by rung, what the library relies on, on a machine that has run none of it yet. A rung is a
// function in its own process; it reports its finding in one line, and details on stderr.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/image.h"
#include "src/base/status.h"
#include "src/driver/cuda.h"
#include "tests/gpu/ladder/kernels_args.h"

namespace moeccl::cuda {
std::vector<Image> ladder_images();  // written by kernels/cuda/embed.py
}

namespace moeccl::ladder {

namespace cu = driver::cuda;

struct Rung {
  const char* name;
  const char* about;
  Result<std::string> (*climb)();
  int connections = 0;   // CUDA_DEVICE_MAX_CONNECTIONS, which the driver reads once
  bool planted = false;  // an error that compute-sanitizer must find; runs only when named
};
const std::vector<Rung>& rungs();

// The first device, with its context current on this thread.
class Device {
 public:
  static Result<Device> open();
  const cu::Driver& d() const { return *cu::driver(); }
  cu::Context context() const { return context_; }
  int attribute(int number) const;
  // Returns a kernel of this program's own image, which the first call loads. With a driver that refuses the image,
  // rungs that need no kernel still run.
  Result<cu::Function> kernel(const char* name) const;
  Result<cu::Stream> stream() const;
  template <class Args>
  Status launch(cu::Function f, cu::Stream s, const Args& args, unsigned blocks = 1, unsigned threads = 32) const {
    return launch_bytes(f, s, &args, blocks, threads);
  }
  Result<cu::Memory> pinned(size_t bytes) const { return cu::Memory::pinned(context_, bytes); }
  Result<cu::Memory> memory(size_t bytes) const { return cu::Memory::device(context_, bytes); }

 private:
  Status launch_bytes(cu::Function f, cu::Stream s, const void* args, unsigned blocks, unsigned threads) const;
  cu::Context context_ = nullptr;
  mutable cu::Module module_ = nullptr;
};

// Returns a function that only some drivers have, or nullptr.
template <class F>
F* symbol(const char* name);
void* find_symbol(const char* name);
template <class F>
F* symbol(const char* name) {
  return reinterpret_cast<F*>(find_symbol(name));
}

// Returns memory as 64-bit words. Page-locked memory has the same address on host and device.
inline uint64_t* words(const cu::Memory& m) { return reinterpret_cast<uint64_t*>(m.data()); }
// Returns the factor for time limits: MOECCL_TEST_PATIENCE, at least 1.
int patience();
uint64_t read_word(const uint64_t* word);
void write_word(uint64_t* word, uint64_t value);
// Polls until the stream has nothing left or the time is over. Returns whether the stream has ended.
bool ends_within(const Device& device, cu::Stream stream, int milliseconds);
double milliseconds_of(int64_t ns);

// rungs_device.cc
Result<std::string> attributes();
Result<std::string> load_images();
Result<std::string> function_needs();
// rungs_memory.cc
Result<std::string> write_to_memfd();
Result<std::string> share_by_descriptor();
Result<std::string> share_by_ipc();
// rungs_streams.cc
Result<std::string> waits_default();
Result<std::string> waits_high();
Result<std::string> calls_in_captures();
// rungs_calls.cc
Result<std::string> calls_beside_a_kernel();
Result<std::string> calls_beside_a_stream();
Result<std::string> launch_queue();
// rungs_kernels.cc
Result<std::string> handshake();
Result<std::string> clock_ticks();
Result<std::string> latencies();
Result<std::string> plant_write();
Result<std::string> plant_race();
// rungs_contract.cc: the kernels' contract test, on the driver
Result<std::string> contract_bytes();
Result<std::string> contract_rows();
Result<std::string> contract_sparse();
Result<std::string> contract_routes();
Result<std::string> contract_records();
Result<std::string> contract_tables();

}  // namespace moeccl::ladder
