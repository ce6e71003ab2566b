// SPDX-License-Identifier: Apache-2.0
// Measures what cores and memory do with bytes: the rates at which plans' copies and sums are priced, and the codec's.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/codec.h"
#include "src/base/random.h"
#include "src/calibrate/measure.h"

namespace moeccl::comm {

Status measure_memory(Communicator& comm, Stopwatch& watch, plan::Profile& profile) {
  constexpr size_t kCached = 128 << 10, kExpert = 4 << 20, kLarge = 16 << 20;
  constexpr double kRatio = 50;  // the codec's default
  // First touched here, on every rank, because all ranks copy at once in the last measurement.
  std::vector<std::byte> in(2 * kLarge, std::byte{1}), out(kLarge, std::byte{2});
  const kernels::KernelTable& table = *comm.fabric().kernels;
  const auto copy = [&](size_t bytes, bool stream) -> Stopwatch::Once {
    return [&, bytes, stream](uint32_t) {
      (stream ? table.copy_stream : table.copy)(out.data(), in.data(), bytes);
      return Status();
    };
  };
  const auto reduce = [&](size_t bytes) -> Stopwatch::Once {
    return [&, bytes](uint32_t) {
      const void* const srcs[] = {in.data(), in.data() + bytes};
      kernels::ReduceArgs args;
      args.dst = out.data();
      args.srcs = srcs;
      args.n_srcs = 2;
      args.count = bytes / sizeof(float);
      args.stream = bytes > kCached;
      table.reduce[moecclFloat32][static_cast<int>(kernels::ReduceOp::kSum)](args);
      return Status();
    };
  };
  // An expert and the shared one. Equal elements would be encoded faster than those of a model.
  if (comm.rank() == 0) {
    SplitMix64 random(1);
    for (size_t at = 0; at < 2 * kExpert; at += sizeof(float)) {
      const auto value = static_cast<float>(random.unit());
      std::memcpy(in.data() + at, &value, sizeof(value));
    }
  }
  const kernels::CodecShape expert{moecclFloat32, kExpert / sizeof(float), kRatio};
  std::vector<std::byte> encoded(kernels::codec_bytes(expert));
  const auto encode = [&](uint32_t) {
    (void)kernels::codec_encode(kernels::best_codec(), expert, in.data(), in.data() + kExpert, encoded.data());
    return Status();
  };
  const auto decode = [&](uint32_t) -> Status {
    if (kernels::codec_decode(expert, encoded.data(), encoded.size(), in.data() + kExpert, out.data())) return {};
    return error(moecclInternalError, "calibration: an expert that was just encoded cannot be decoded");
  };
  // One core: the other ranks sleep.
  std::vector<Stopwatch::Once> alone{copy(kCached, false),
                                     copy(kLarge, false),
                                     copy(kLarge, true),
                                     reduce(kCached / 4),
                                     reduce(kLarge),
                                     encode,
                                     decode};
  if (comm.rank() != 0) alone.assign(alone.size(), nullptr);
  MOECCL_ASSIGN_OR_RETURN(const Stopwatch::Times one, watch.time(alone, 0, 0));
  MOECCL_TRY(watch.enough(one, "rates of copies, sums and the codec"));
  MOECCL_ASSIGN_OR_RETURN(const Stopwatch::Times all, watch.time({copy(kLarge, true)}, 0, 0));
  MOECCL_TRY(watch.enough(all, "rates of all cores together"));
  const double ranks = plan::ranks_per_host(comm.tree(), profile);
  profile.cached_copy_bytes_per_ns = kCached / one.ns[0];
  profile.copy_bytes_per_ns = std::min(kLarge / one.ns[1], profile.cached_copy_bytes_per_ns);
  profile.stream_bytes_per_ns = kLarge / one.ns[2];
  profile.cached_reduce_bytes_per_ns = 2 * (kCached / 4) / one.ns[3];
  profile.reduce_bytes_per_ns = std::min(2 * kLarge / one.ns[4], profile.cached_reduce_bytes_per_ns);
  profile.encode_bytes_per_ns = kExpert / one.ns[5];
  profile.decode_bytes_per_ns = kExpert / one.ns[6];
  profile.host_copy_bytes_per_ns = std::max(ranks * kLarge / all.ns[0], profile.stream_bytes_per_ns);
  return {};
}

}  // namespace moeccl::comm
