// SPDX-License-Identifier: Apache-2.0
#include "src/exec/flight_directory.h"

#include <array>
#include <cstddef>
#include <mutex>

#include "src/base/clock.h"
#include "src/base/data_type.h"
#include "src/base/ticks.h"
#include "src/driver/fork_page.h"
#include "src/exec/operation.h"

namespace moeccl::exec {
namespace {

template <size_t n, typename Name>
constexpr std::array<const char*, n> names(Name name) {
  std::array<const char*, n> out{};
  for (size_t i = 0; i < n; ++i) out[i] = name(i);
  return out;
}
constexpr auto kOpNames = names<MOECCL_NUM_OPS>([](size_t i) { return op_name(static_cast<moecclOp_t>(i)); });
constexpr auto kTypeNames =
    names<MOECCL_NUM_DATA_TYPES>([](size_t i) { return type_name(static_cast<moecclDataType_t>(i)); });
constexpr size_t kOperators = kPreMulSum + 1;

// An additional field needs a new number at the end of the magic word, because the debugger's script must know what it
// reads. The directory is initialised, so that it lies in .data of every library or program that contains it. It is
// global, because a debugger has nothing else to find it by.
struct Directory {
  char magic[16] = {'M', 'o', 'E', 'C', 'C', 'L', ' ', 'f', 'l', 'i', 'g', 'h', 't', ' ', '0', '1'};
  uint64_t record_bytes = sizeof(FlightRecord), n_records = FlightPage::kRecords;
  uint64_t records_at = offsetof(FlightPage, records), count_at = offsetof(FlightPage, count);
  uint64_t sequence_at = offsetof(FlightRecord, sequence), op_at = offsetof(FlightRecord, op);
  uint64_t type_at = offsetof(FlightRecord, type), reduce_at = offsetof(FlightRecord, reduce);
  uint64_t root_at = offsetof(FlightRecord, root), elements_at = offsetof(FlightRecord, count);
  uint64_t has_plan_at = offsetof(FlightRecord, has_plan), algorithm_at = offsetof(FlightRecord, algorithm);
  uint64_t start_at = offsetof(FlightRecord, start), end_at = offsetof(FlightRecord, end);
  uint64_t state_at = offsetof(FlightRecord, state);
  uint64_t n_ops = kOpNames.size(), n_types = kTypeNames.size(), n_operators = kOperators;
  const char* const* ops = kOpNames.data();
  const char* const* types = kTypeNames.data();
  const char* operators[kOperators] = {};
  // The clocks at one moment, when the first communicator was made: ticks, and nanoseconds since 1970.
  int64_t ticks = 0, since_epoch_ns = 0;
  double ns_per_tick = 0;
  FlightEntry* first = nullptr;
};
constinit Directory directory;
constinit driver::PerProcess<std::mutex> locks;  // a child may inherit one that another thread held

}  // namespace

FlightEntry::FlightEntry(const Places& places) : places_(places) {
  const std::lock_guard lock(locks.get());
  if (directory.ns_per_tick == 0) {
    constexpr int64_t kMany = 1'000'000'000;
    for (size_t i = 0; i < kOperators; ++i) directory.operators[i] = reduce_name(static_cast<uint8_t>(i));
    directory.ns_per_tick = static_cast<double>(Ticks::to_ns(kMany)) / static_cast<double>(kMany);
    directory.ticks = Ticks::now();
    directory.since_epoch_ns = unix_ns();
  }
  next_ = directory.first;
  link_ = &directory.first;
  if (next_ != nullptr) next_->link_ = &next_;
  directory.first = this;
}

FlightEntry::~FlightEntry() {
  const std::lock_guard lock(locks.get());
  *link_ = next_;
  if (next_ != nullptr) next_->link_ = link_;
}

}  // namespace moeccl::exec
