// SPDX-License-Identifier: Apache-2.0
#include "src/moe/migrate/migration.h"
#include "src/comm/group.h"

#include <algorithm>
#include <cstring>

#include "src/base/adopt.h"
#include "src/comm/collective.h"
#include "src/comm/cuda_stream.h"
#include "src/moe/creation.h"
#include "src/moe/migrate/codec_config.h"

namespace moeccl::comm {

namespace {

constexpr int32_t kDefaultDepth = 2;  // one entry travels while the next is encoded
constexpr int32_t kMostDepth = 64;

Result<moecclMigrationConfig_t> checked(const moecclMigrationConfig_t* given) {
  MOECCL_ASSIGN_OR_RETURN(moecclMigrationConfig_t c, checked_codec_config(given));
  if (c.depth == 0) c.depth = kDefaultDepth;
  if (c.depth < 1 || c.depth > kMostDepth)
    return error(moecclInvalidArgument, "config.depth is {}: give 1 to {}", c.depth, kMostDepth);
  return c;
}

constexpr const char* kFields[] = {"count", "type", "ratio", "n_layers", "depth", "hybrid (its homes and domains)"};

}  // namespace

Migration::Migration(const Hybrid& hybrid, Communicator& comm, const moecclMigrationConfig_t& c)
    : comm_(comm),
      hybrid_(comm, hybrid.homes(), hybrid.domains()),
      codec_{c.type, c.count, c.ratio},
      expert_bytes_(c.ratio <= 1 ? c.count * moecclTypeSize(c.type) : kernels::codec_bytes(codec_)),
      depth_(static_cast<uint32_t>(c.depth)),
      layers_(static_cast<size_t>(c.n_layers)),
      rooms_(comm) {}

Result<std::unique_ptr<Migration>> Migration::create(const Hybrid& hybrid, Communicator& comm,
                                                     const moecclMigrationConfig_t* given) {
  MOECCL_TRY(comm.usable());
  const Status same = hybrid.same_ranks(comm);
  const Result<moecclMigrationConfig_t> config = same.ok() ? checked(given) : Result<moecclMigrationConfig_t>(same);
  AgreedFields<std::size(kFields)> mine;
  mine.code = config.ok() ? moecclSuccess : config.status().code();
  if (config.ok()) {
    mine = {{static_cast<double>(config->count), static_cast<double>(config->type), config->ratio,
             static_cast<double>(config->n_layers), static_cast<double>(config->depth), placement_field(hybrid)}};
  }
  MOECCL_ASSIGN_OR_RETURN(const auto all, answers_of(comm, mine, config.status(), "fails in moecclMigrationCreate"));
  MOECCL_TRY(compare("moecclMigrationCreate", kFields, all));
  return std::unique_ptr<Migration>(new Migration(hybrid, comm, *config));
}

Result<Migration::Layer*> Migration::layer_at(int layer) {
  if (layer < 0 || static_cast<size_t>(layer) >= layers_.size())
    return error(moecclInvalidArgument, "layer is {}: the migration has layers 0 to {}", layer, layers_.size() - 1);
  return &layers_[static_cast<size_t>(layer)];
}

Result<exec::CudaCodec*> Migration::device_codec() {
  if (cuda_codec_ == nullptr) {
    MOECCL_ASSIGN_OR_RETURN(cuda_codec_, exec::CudaCodec::create(comm_.cuda()->engine(), codec_));
  }
  return cuda_codec_.get();
}

Result<uint64_t> Migration::checksum_of(const void* shared, bool cuda, bool is_complete) {
  if (exact()) return uint64_t{0};
  if (!cuda) return kernels::checksum(shared, codec_.count * moecclTypeSize(codec_.type));
  MOECCL_ASSIGN_OR_RETURN(exec::CudaCodec * codec, device_codec());
  return codec->checksum(shared, is_complete);
}

Status Migration::send(int number, const void* experts, const void* shared, moecclCodecError_t* errors,
                       ExpertUpdate* update) {
  MOECCL_ASSIGN_OR_RETURN(Layer * layer, layer_at(number));
  if (layer->to_send.size() >= depth_)
    return error(moecclInvalidUsage, "the send queue of layer {} holds {} entries, which is its depth: begin one first",
                 number, depth_);
  const size_t n_own = hybrid_.own().size(), whole = codec_.count * moecclTypeSize(codec_.type);
  if (experts == nullptr && n_own * whole > 0)
    return error(moecclInvalidArgument, "experts is NULL: give {} experts of {} elements", n_own, codec_.count);
  if (shared == nullptr && !exact() && whole > 0)
    return error(moecclInvalidArgument, "shared is NULL: give {} elements, or use ratio 1", codec_.count);
  MOECCL_ASSIGN_OR_RETURN(const exec::Runner* runner, comm_.place(experts, exact() ? nullptr : shared));
  const bool cuda = runner->on_device();
  if (cuda && update != nullptr)
    return error(moecclUnsupported,
                 "experts is CUDA memory, and a fused step runs on the host: call moecclMigrationSend behind the step");
  Packed packed;
  MOECCL_ASSIGN_OR_RETURN(packed.experts, rooms_.take(n_own * expert_bytes_, cuda));
  MOECCL_ASSIGN_OR_RETURN(packed.checksum, checksum_of(shared, cuda));
  if (Status encoded = encode(packed, experts, shared, errors, update); !encoded.ok()) {
    rooms_.give_back(std::move(packed.experts));
    return encoded;
  }
  layer->to_send.push_back(std::move(packed));
  return {};
}

Status Migration::encode(Packed& packed, const void* experts, const void* shared, moecclCodecError_t* errors,
                         ExpertUpdate* update) {
  const size_t n_own = hybrid_.own().size(), whole = codec_.count * moecclTypeSize(codec_.type);
  std::vector<kernels::CodecError> lost(n_own);
  if (packed.experts.cuda) {
    MOECCL_ASSIGN_OR_RETURN(exec::CudaCodec * codec, device_codec());
    MOECCL_TRY(codec->encode(experts, shared, packed.experts.data(), n_own, errors == nullptr ? nullptr : lost.data()));
  }
  const kernels::CodecUpdate step = update == nullptr ? kernels::CodecUpdate() : update->function();
  if (!packed.experts.cuda && !exact()) {
    const kernels::CodecExperts all{experts, shared, packed.experts.data(), lost.data(), static_cast<uint32_t>(n_own)};
    (void)kernels::codec_encode(kernels::best_codec(), codec_, all, step);  // update knows where it stopped
  }
  for (uint32_t e = 0; e < n_own && !packed.experts.cuda && exact(); ++e)
    if (!kernels::codec_copy(static_cast<const std::byte*>(experts) + e * whole,
                             packed.experts.data() + e * expert_bytes_, codec_.count, moecclTypeSize(codec_.type), e,
                             step))
      break;
  if (update != nullptr) MOECCL_TRY(update->status("nothing was queued: finish the step and call moecclMigrationSend"));
  for (size_t e = 0; e < n_own && errors != nullptr; ++e) errors[e] = {lost[e].max_dropped, lost[e].relative};
  return {};
}

Status Migration::check_buffers(const void* shared, const void* held) const {
  const size_t n_held = hybrid_.held().size(), whole = codec_.count * moecclTypeSize(codec_.type);
  if (held == nullptr && n_held * whole > 0)
    return error(moecclInvalidArgument, "held is NULL: give room for {} experts of {} elements", n_held, codec_.count);
  if (shared == nullptr && !exact() && whole > 0)
    return error(moecclInvalidArgument, "shared is NULL: give what moecclMigrationSend had");
  return {};
}

Status Migration::check_kind(int layer, bool cuda, const void* shared, const void* held) const {
  const bool bytes = hybrid_.held().size() * codec_.count > 0;
  const void* const buffers[] = {exact() ? nullptr : shared, bytes ? held : nullptr};
  for (const void* buffer : buffers)
    if (const bool fits =
            buffer == nullptr || (cuda ? driver::cuda::pointed(buffer).type != 0 : !comm_.is_device_memory(buffer));
        !fits)
      return error(moecclInvalidArgument,
                   "layer {}: {} is {} memory, but moecclMigrationSend was given {} memory: give buffers of one kind",
                   layer, buffer == held ? "held" : "shared", cuda ? "host" : "CUDA", cuda ? "CUDA" : "host");
  return {};
}

Status Migration::begin(int number, const Into* into) {
  MOECCL_ASSIGN_OR_RETURN(Layer * layer, layer_at(number));
  MOECCL_TRY(comm_.usable());
  if (layer->to_send.empty())
    return error(moecclInvalidUsage, "the send queue of layer {} is empty: call moecclMigrationSend first", number);
  if (layer->flights.size() >= depth_)
    return error(moecclInvalidUsage,
                 "the receive queue of layer {} holds {} entries, which is its depth: wait for one first", number,
                 depth_);
  if (into != nullptr) {
    MOECCL_TRY(check_buffers(into->shared, into->held));
    MOECCL_TRY(check_kind(number, layer->to_send.front().experts.cuda, into->shared, into->held));
    if (decoder_ == nullptr) decoder_ = std::make_unique<HostStream>();
  }
  auto flight = std::make_shared<Flight>();
  // The entry stays in the queue until the last step that can fail.
  Packed& entry = layer->to_send.front();
  Room& own = entry.experts;
  if (into != nullptr) {
    flight->into = *into;
    if (own.cuda) {
      MOECCL_ASSIGN_OR_RETURN(flight->earlier, earlier_work(comm_, nullptr));
    }
  }
  MOECCL_ASSIGN_OR_RETURN(flight->arrived, rooms_.take(hybrid_.held().size() * expert_bytes_, own.cuda));
  flight->words.resize(comm_.n_ranks());
  flight->mine = {layer->begun, entry.checksum, number, moecclSuccess};
  MOECCL_TRY(hybrid_.prepare_gather(own.data(), flight->arrived.data(), expert_bytes_, flight->gather));
  const Communicator::OwnExchange ours(comm_);
  CollectiveCall exchange;
  exchange.op = moecclOpAllGather;
  exchange.send = &flight->mine;
  exchange.recv = flight->words.data();
  exchange.count = sizeof(Word);
  exchange.type = moecclUint8;
  MOECCL_TRY(prepare_collective(comm_, exchange, flight->exchange));
  Stream::Work decoding;
  if (into != nullptr)
    decoding = decoder_->hold([this, flight] {
      finish(*flight, contained([&] { return decode(*flight, flight->into->shared, flight->into->held); }));
      return Status();  // wait() reports the status
    });
  Stream::Work work = stream_.hold([this, flight, decoding]() mutable {
    Status status = run(*flight);
    if (!flight->into || !status.ok()) {
      finish(*flight, std::move(status));
      return Status();
    }
    return decoder_->enqueue(std::move(decoding));
  });
  layer->flights.push_back(flight);  // the last step that can fail: an operation with a ticket must run
  flight->packed = std::move(entry);
  layer->to_send.pop_front();
  ++layer->begun;
  Communicator::promise(flight->gather);
  flight->gather_ticket = comm_.take_ticket();
  flight->exchange_ticket = comm_.take_ticket();
  return stream_.enqueue(std::move(work));
}

void Migration::finish(Flight& flight, Status status) {
  // From here on the communicator may end.
  std::shared_ptr<const void> communicator;
  if (flight.into) communicator = std::move(flight.into->communicator);
  {
    const std::lock_guard lock(mutex_);
    flight.status = std::move(status);
    flight.done = true;
  }
  changed_.notify_all();
}

// Takes both turns whatever happens, so that the communicator can go on.
Status Migration::run(Flight& flight) {
  // On CUDA memory, the gather waits for none of the caller's streams, because the encoded experts are complete.
  exec::StreamWork work;
  work.blocks = true;
  const exec::StreamWork::Scope scope(work);
  Status gathered = comm_.run_in_turn(flight.gather_ticket, flight.gather);
  if (gathered.ok() && !exact()) {
    // Decoding must not fail after the ranks have agreed.
    bool fine = false;
    gathered = contained([&]() -> Status {
      MOECCL_ASSIGN_OR_RETURN(fine, decodes(flight));
      return {};
    });
    if (!fine) flight.mine.code = moecclInternalError;
  }
  if (gathered.ok() && flight.into) {
    gathered = contained([&]() -> Status {
      if (flight.earlier != nullptr) MOECCL_TRY(flight.earlier->wait(flight.gather.runner->fabric()));
      MOECCL_ASSIGN_OR_RETURN(const uint64_t now, checksum_of(flight.into->shared, flight.arrived.cuda, true));
      if (now != flight.packed.checksum) flight.mine.code = moecclInvalidUsage;
      return {};
    });
    if (!gathered.ok()) flight.mine.code = gathered.code();  // no rank may switch if one cannot
  }
  Status exchanged = comm_.run_in_turn(flight.exchange_ticket, flight.exchange);
  MOECCL_TRY(std::move(gathered));
  MOECCL_TRY(std::move(exchanged));
  return contained([&] { return verdict(flight); });
}

Result<bool> Migration::decodes(Flight& flight) {
  const size_t n = hybrid_.held().size();
  if (flight.arrived.cuda) return cuda_codec_->valid(flight.arrived.data(), n);
  for (size_t h = 0; h < n; ++h)
    if (!kernels::codec_valid(codec_, flight.arrived.data() + h * expert_bytes_, expert_bytes_)) return false;
  return true;
}

// All ranks have the same words and so reach the same verdict.
Status Migration::verdict(const Flight& flight) const {
  const std::vector<Word>& w = flight.words;
  for (uint32_t r = 0; r < w.size(); ++r) {
    if (w[r].layer != w[0].layer)
      return error(moecclMismatch, "rank 0 begins layer {}, rank {} layer {}: begin the same layers in the same order",
                   w[0].layer, r, w[r].layer);
    if (w[r].epoch != w[0].epoch)
      return error(moecclMismatch, "layer {}: rank 0 begins its gather number {}, rank {} number {}", w[0].layer,
                   w[0].epoch, r, w[r].epoch);
    if (w[r].checksum != w[0].checksum)
      return error(moecclMismatch,
                   "layer {}: the shared experts of rank 0 and rank {} differ: bring them in step by "
                   "moecclSharedExpert; no rank has switched",
                   w[0].layer, r);
    if (w[r].code == moecclInvalidUsage)
      return error(moecclInvalidUsage,
                   "layer {}: the shared expert of rank {} is not what its moecclMigrationSend had: keep it until the "
                   "wait; no rank has switched",
                   w[0].layer, r);
    if (w[r].code != moecclSuccess && w[r].code != moecclInternalError)
      return error(moecclRemoteError, "layer {}: rank {} could not read its shared expert ({}); no rank has switched",
                   w[0].layer, r, moecclGetErrorString(static_cast<moecclResult_t>(w[r].code)));
    if (w[r].code != moecclSuccess)
      return error(moecclInternalError, "layer {}: rank {} received experts that do not decode; no rank has switched",
                   w[0].layer, r);
  }
  return {};
}

Status Migration::check_held(int index) const {
  const size_t n_held = hybrid_.held().size();
  if (index >= 0 && static_cast<size_t>(index) < n_held) return {};
  return error(moecclInvalidArgument, "index is {}: this rank holds experts 0 to {}", index, int64_t(n_held) - 1);
}

Status Migration::wait_expert(int number, int index) {
  MOECCL_ASSIGN_OR_RETURN(Layer * layer, layer_at(number));
  if (layer->flights.empty())
    return error(moecclInvalidUsage, "nothing has begun on layer {}: call moecclMigrationBeginInto first", number);
  const std::shared_ptr<Flight> flight = layer->flights.front();
  if (!flight->into)
    return error(moecclInvalidUsage,
                 "layer {} was begun by moecclMigrationBegin: its experts come at moecclMigrationWait", number);
  MOECCL_TRY(check_held(index));
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return flight->done || flight->decoded > static_cast<size_t>(index); });
  if (flight->decoded > static_cast<size_t>(index)) return {};
  return flight->status;
}

Result<Migration::Flight*> Migration::oldest(int number, Layer& layer) {
  if (layer.flights.empty())
    return error(moecclInvalidUsage, "nothing has begun on layer {}: call moecclMigrationBegin first", number);
  return layer.flights.front().get();
}

Status Migration::check_shared(int number, const Flight& flight, const void* shared, const void* held) {
  MOECCL_TRY(check_kind(number, flight.arrived.cuda, shared, held));
  MOECCL_ASSIGN_OR_RETURN(const uint64_t now, checksum_of(shared, flight.arrived.cuda));
  if (now != flight.packed.checksum)
    return error(moecclInvalidUsage,
                 "shared is not the shared expert that moecclMigrationSend had on layer {}: keep it until the wait",
                 number);
  return {};
}

std::pair<std::shared_ptr<Migration::Flight>, Status> Migration::take(Layer& layer) {
  std::shared_ptr<Flight> flight = layer.flights.front();
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return flight->done; });
  }
  layer.flights.pop_front();
  rooms_.give_back(std::move(flight->packed.experts));
  Status status = flight->status;
  return {std::move(flight), std::move(status)};
}

void Migration::switched(Layer& layer, uint64_t* epoch) {
  if (layer.keeps) rooms_.give_back(std::move(layer.encoded));
  layer.keeps = false;
  ++layer.epoch;
  if (epoch != nullptr) *epoch = layer.epoch;
}

Status Migration::wait(int number, const void* shared, void* held, uint64_t* epoch) {
  MOECCL_ASSIGN_OR_RETURN(Layer * layer, layer_at(number));
  MOECCL_ASSIGN_OR_RETURN(const Flight* first, oldest(number, *layer));
  if (first->into) {
    if ((shared != nullptr && shared != first->into->shared) || (held != nullptr && held != first->into->held))
      return error(moecclInvalidArgument,
                   "layer {}: {} is not what moecclMigrationBeginInto had: give the same, or NULL", number,
                   held != nullptr && held != first->into->held ? "held" : "shared");
  } else {
    MOECCL_TRY(check_buffers(shared, held));
    MOECCL_TRY(check_shared(number, *first, shared, held));
  }
  auto [flight, status] = take(*layer);
  if (status.ok() && !flight->into) status = decode(*flight, shared, held);
  rooms_.give_back(std::move(flight->arrived));
  MOECCL_TRY(std::move(status));
  switched(*layer, epoch);
  return {};
}

Status Migration::wait_encoded(int number, const void* shared, uint64_t* epoch) {
  MOECCL_ASSIGN_OR_RETURN(Layer * layer, layer_at(number));
  MOECCL_ASSIGN_OR_RETURN(const Flight* first, oldest(number, *layer));
  if (first->into)
    return error(moecclInvalidUsage,
                 "layer {} was begun by moecclMigrationBeginInto, which decodes: call moecclMigrationWait", number);
  if (first->arrived.cuda)
    return error(moecclUnsupported,
                 "layer {}: its experts are in CUDA memory, where they are not decoded piece by piece: call "
                 "moecclMigrationWait",
                 number);
  if (shared == nullptr && !exact() && codec_.count > 0)
    return error(moecclInvalidArgument, "shared is NULL: give what moecclMigrationSend had");
  MOECCL_TRY(check_shared(number, *first, shared, nullptr));
  auto [flight, status] = take(*layer);
  if (!status.ok()) {
    rooms_.give_back(std::move(flight->arrived));
    return std::move(status);
  }
  switched(*layer, epoch);
  layer->encoded = std::move(flight->arrived);
  layer->shared = shared;
  layer->keeps = true;
  return {};
}

Status Migration::use_expert(int number, int index, const moecclExpertUse_t* given) {
  MOECCL_ASSIGN_OR_RETURN(Layer * layer, layer_at(number));
  if (!layer->keeps)
    return error(moecclInvalidUsage, "layer {} keeps no encoded experts: switch it by moecclMigrationWaitEncoded",
                 number);
  MOECCL_TRY(check_held(index));
  MOECCL_ASSIGN_OR_RETURN(ExpertUse use, ExpertUse::create(given, codec_.count));
  const std::byte* from = layer->encoded.data() + static_cast<size_t>(index) * expert_bytes_;
  if (exact()) {
    kernels::codec_use(from, moecclTypeSize(codec_.type), use.range(), use.function());
  } else if (!kernels::codec_decode(codec_, from, expert_bytes_, layer->shared, use.range(), use.function())) {
    return error(moecclInternalError, "layer {}: expert {}, which was checked, does not decode", number, index);
  }
  return use.status();
}

Status Migration::decode(Flight& flight, const void* shared, void* held) {
  const size_t n_held = hybrid_.held().size(), whole = codec_.count * moecclTypeSize(codec_.type);
  if (flight.arrived.cuda) {
    MOECCL_ASSIGN_OR_RETURN(exec::CudaCodec * codec, device_codec());
    return codec->decode(flight.arrived.data(), shared, held, n_held);
  }
  for (size_t h = 0; h < n_held; ++h) {
    const std::byte* from = flight.arrived.data() + h * expert_bytes_;
    std::byte* to = static_cast<std::byte*>(held) + h * whole;
    if (exact()) {
      if (whole > 0) std::memcpy(to, from, whole);
    } else if (!kernels::codec_decode(codec_, from, expert_bytes_, shared, to)) {
      return error(moecclInternalError, "layer {}: an expert that was checked does not decode", flight.mine.layer);
    }
    if (!flight.into) continue;
    {
      const std::lock_guard lock(mutex_);
      flight.decoded = h + 1;
    }
    changed_.notify_all();
  }
  return {};
}

Status Migration::test(int number, int* done) {
  MOECCL_ASSIGN_OR_RETURN(Layer * layer, layer_at(number));
  if (done == nullptr) return error(moecclInvalidArgument, "done is NULL: give the address of an int");
  if (layer->flights.empty())
    return error(moecclInvalidUsage, "nothing has begun on layer {}: call moecclMigrationBegin first", number);
  const std::lock_guard lock(mutex_);
  *done = layer->flights.front()->done;
  return {};
}

Status Migration::info(int number, moecclMigrationInfo_t* out) const {
  if (number < 0 || static_cast<size_t>(number) >= layers_.size())
    return error(moecclInvalidArgument, "layer is {}: the migration has layers 0 to {}", number, layers_.size() - 1);
  MOECCL_TRY(check_out(out, "info"));
  const Layer& layer = layers_[static_cast<size_t>(number)];
  moecclMigrationInfo_t info{};
  info.epoch = layer.epoch;
  info.to_send = static_cast<int32_t>(layer.to_send.size());
  info.to_receive = static_cast<int32_t>(layer.flights.size());
  info.expert_bytes = expert_bytes_;
  const algo::Domains& domains = *hybrid_.domains();
  for (const algo::Domains::Send& send : domains.sends()) {
    if (send.from != comm_.rank()) continue;
    for (const uint32_t home : domains.held(send.from, send.level))
      info.sent_bytes += hybrid_.homes().n_local(home) * expert_bytes_;
  }
  // Counts the entries to send, the entries in flight, and the experts that those bring.
  info.memory_bytes = layers_.size() * depth_ * expert_bytes_ * (2 * hybrid_.own().size() + hybrid_.held().size());
  const auto keeping = std::count_if(layers_.begin(), layers_.end(), [](const Layer& l) { return l.keeps; });
  info.memory_bytes += static_cast<uint64_t>(keeping) * expert_bytes_ * hybrid_.held().size();
  give(info, out);
  return {};
}

}  // namespace moeccl::comm
