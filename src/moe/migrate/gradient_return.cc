// SPDX-License-Identifier: Apache-2.0
#include "src/moe/migrate/gradient_return.h"

#include <algorithm>
#include <cstring>

#include "kernels/element.h"
#include "src/base/adopt.h"
#include "src/comm/collective.h"
#include "src/comm/group.h"
#include "src/driver/cuda.h"
#include "src/exec/bounded_run.h"
#include "src/moe/creation.h"
#include "src/moe/migrate/codec_config.h"

namespace moeccl::comm {

namespace {

constexpr const char* kFields[] = {"count",    "type",          "ratio",
                                   "n_layers", "device_memory", "hybrid (its homes and domains)"};

using Fp32 = kernels::Native<float>;
using Bf16 = kernels::Narrow<kernels::Bf16, uint16_t>;

// The compiler vectorizes inner loops of a fixed length whose pointers cannot alias.
constexpr uint64_t kBatch = 16;

template <class Element>
using Stored = typename Element::Stored;

// sum = gradient + remainder for n elements, rounded to the type. The remainder must be computed from the same sum.
template <class Element>
void add_remainder(const void* __restrict gradient, const float* __restrict r, void* __restrict sum, uint64_t n) {
  const auto* g = static_cast<const Stored<Element>*>(gradient);
  auto* s = static_cast<Stored<Element>*>(sum);
  const auto add = [](Stored<Element> a, float b) { return Element::round(Element::load(a) + b); };
  for (; n >= kBatch; n -= kBatch, g += kBatch, r += kBatch, s += kBatch)
    for (uint64_t i = 0; i < kBatch; ++i) s[i] = add(g[i], r[i]);
  for (uint64_t i = 0; i < n; ++i) s[i] = add(g[i], r[i]);
}

// remainder = gradient + remainder - decoded, or 0 if that is not finite.
template <class Element>
void keep_remainder(const void* gradient, const void* decoded, float* __restrict r, uint64_t n) {
  const auto* g = static_cast<const Stored<Element>*>(gradient);
  const auto* d = static_cast<const Stored<Element>*>(decoded);
  const auto keep = [](Stored<Element> a, float b, Stored<Element> c) {
    const float left = (Element::load(a) + b) - Element::load(c);
    return left - left == 0 ? left : 0.0f;
  };
  for (; n >= kBatch; n -= kBatch, g += kBatch, r += kBatch, d += kBatch)
    for (uint64_t i = 0; i < kBatch; ++i) r[i] = keep(g[i], r[i], d[i]);
  for (uint64_t i = 0; i < n; ++i) r[i] = keep(g[i], r[i], d[i]);
}

}  // namespace

GradientReturn::GradientReturn(const Hybrid& hybrid, Communicator& comm, const moecclGradientReturnConfig_t& c)
    : comm_(comm), hybrid_(comm, hybrid.homes(), hybrid.domains()), codec_{c.type, c.count, c.ratio} {
  expert_bytes_ = exact() ? whole() : kernels::codec_bytes(codec_);
}

GradientReturn::~GradientReturn() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return n_flying_ == 0; });
  if (lets_go_ && device_ != nullptr)
    exec::bounded_run(Communicator::kEndsIn_ns, [device = device_.release()] { delete device; });
}

void GradientReturn::lay_out() {
  const std::vector<uint32_t>& owners = hybrid_.homes().owner;
  for (size_t h = 0; h < hybrid_.held().size(); ++h) {
    const uint32_t owner = owners[static_cast<size_t>(hybrid_.held()[h])];
    if (owner == comm_.rank()) {
      own_held_.push_back(h);
    } else {
      foreign_.push_back({owner, h, foreign_.size()});
    }
  }
  std::stable_sort(foreign_.begin(), foreign_.end(),
                   [](const Foreign& a, const Foreign& b) { return a.owner < b.owner; });
  const uint32_t n = comm_.n_ranks(), depth = comm_.tree().depth();
  for (std::vector<size_t>* v : {&send_bytes_, &send_at_, &recv_bytes_, &recv_at_}) v->assign(n, 0);
  for (const Foreign& f : foreign_) send_bytes_[f.owner] += expert_bytes_;
  for (uint32_t r = 0; r < n; ++r) {
    const std::vector<uint32_t>& homes = hybrid_.domains()->held(r, depth);
    if (r != comm_.rank() && std::find(homes.begin(), homes.end(), comm_.rank()) != homes.end())
      recv_bytes_[r] = own_held_.size() * expert_bytes_;
    if (r == 0) continue;
    send_at_[r] = send_at_[r - 1] + send_bytes_[r - 1];
    recv_at_[r] = recv_at_[r - 1] + recv_bytes_[r - 1];
  }
  // Each rank sends itself the byte behind the gradients. Without any bytes, a rank would not know the kind of memory
  // that the others use.
  send_at_[comm_.rank()] = sent_bytes();
  recv_at_[comm_.rank()] = received_bytes();
  send_bytes_[comm_.rank()] = recv_bytes_[comm_.rank()] = 1;
}

Status GradientReturn::allocate(size_t n_layers, bool on_device) {
  layers_.resize(n_layers);
  if (exact()) return {};
  lay_out();
  if (on_device) {
    if (comm_.cuda() == nullptr)
      return error(
          moecclInvalidArgument,
          "config.device_memory is 1, but the communicator has no CUDA device: make a context current on every "
          "rank's thread before the communicator is created, or give 0");
    comm_.wait_idle();  // an allocation may wait for a kernel that waits for this rank
    exec::CudaGradients::Shape shape{codec_, {}, {}, {}, {}, sent_bytes() + 1, received_bytes() + 1};
    for (const Foreign& f : foreign_) {
      shape.foreign.push_back(static_cast<uint32_t>(f.held));
      shape.remainder.push_back(static_cast<uint32_t>(f.remainder));
    }
    for (const size_t h : own_held_) shape.own.push_back(static_cast<uint32_t>(h));
    for (uint32_t r = 0; r < comm_.n_ranks(); ++r)
      if (r != comm_.rank() && recv_bytes_[r] > 0) shape.arrives.push_back(recv_at_[r]);
    MOECCL_ASSIGN_OR_RETURN(device_, exec::CudaGradients::create(comm_.cuda()->engine(), std::move(shape), n_layers));
  } else {
    for (Layer& layer : layers_) layer.remainders.assign(foreign_.size() * codec_.count, 0.0f);
    zeros_.assign(whole(), std::byte{0});
  }
  spare_.push_back(make_flight());
  return {};
}

Result<std::unique_ptr<GradientReturn>> GradientReturn::create(const Hybrid& hybrid, Communicator& comm,
                                                               const moecclGradientReturnConfig_t* given) {
  MOECCL_TRY(comm.usable());
  std::unique_ptr<GradientReturn> made;
  AgreedFields<std::size(kFields)> mine;
  const Status own = contained([&]() -> Status {
    MOECCL_TRY(hybrid.same_ranks(comm));
    MOECCL_ASSIGN_OR_RETURN(const moecclGradientReturnConfig_t c, checked_codec_config(given));
    mine = {{static_cast<double>(c.count), static_cast<double>(c.type), c.ratio, static_cast<double>(c.n_layers),
             static_cast<double>(c.device_memory), placement_field(hybrid)}};
    if (c.device_memory != 0 && c.device_memory != 1)
      return error(moecclInvalidArgument, "config.device_memory is {}: give 1 for CUDA memory or 0 for host memory",
                   c.device_memory);
    made.reset(new GradientReturn(hybrid, comm, c));
    return made->allocate(static_cast<size_t>(c.n_layers), c.device_memory == 1);
  });
  mine.code = own.code();
  MOECCL_ASSIGN_OR_RETURN(const auto all, answers_of(comm, mine, own, "fails in moecclGradientReturnCreate"));
  MOECCL_TRY(compare("moecclGradientReturnCreate", kFields, all));
  return made;
}

Status GradientReturn::check_layer(int layer) const {
  if (layer >= 0 && static_cast<size_t>(layer) < layers_.size()) return {};
  return error(moecclInvalidArgument, "layer is {}: the gradient return has layers 0 to {}", layer, layers_.size() - 1);
}

std::unique_ptr<GradientReturn::Flight> GradientReturn::make_flight() const {
  auto flight = std::make_unique<Flight>();
  if (device_ != nullptr) return flight;
  flight->sent.resize(sent_bytes() + 1);
  flight->arrived.resize(received_bytes() + 1);
  flight->sum.resize(foreign_.empty() ? 0 : whole());
  return flight;
}

std::shared_ptr<GradientReturn::Lease> GradientReturn::lease() {
  std::unique_ptr<Flight> flight;
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      flight = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (flight == nullptr) flight = make_flight();
  return std::make_shared<Lease>(*this, std::move(flight));
}

GradientReturn::Lease::Lease(GradientReturn& of, std::unique_ptr<Flight> flight) : of_(of), flight_(std::move(flight)) {
  const std::lock_guard lock(of_.mutex_);
  of_.spare_.reserve(of_.spare_.size() + of_.n_flying_ + 1);  // so that giving back needs no memory
  ++of_.n_flying_;
}

GradientReturn::Lease::~Lease() {
  // Notifies under the lock, because the object may end as soon as the count is 0.
  const std::lock_guard lock(of_.mutex_);
  --of_.n_flying_;
  flight_->exchange.promise = nullptr;  // if it did not run
  of_.spare_.push_back(std::move(flight_));
  of_.changed_.notify_all();
}

Status GradientReturn::prepare_exchange(const void* sent, void* arrived, size_t layer,
                                        exec::Operation& exchange) const {
  CollectiveCall call{.op = moecclOpAllToAllv};
  call.send = sent;
  call.recv = arrived;
  call.type = moecclUint8;
  call.send_counts = send_bytes_.data();
  call.send_displs = send_at_.data();
  call.recv_counts = recv_bytes_.data();
  call.recv_displs = recv_at_.data();
  MOECCL_TRY(prepare_collective(comm_, call, exchange));
  exchange.signature.root = static_cast<uint32_t>(layer) + 1;  // a rank in another layer is noticed
  return {};
}

Status GradientReturn::check_kind(const void* held, const void* own) const {
  const bool on_device = device_ != nullptr;
  const size_t n_held = foreign_.size() + own_held_.size();
  for (const void* buffer : {held, own})
    if ((buffer == held ? n_held : own_held_.size()) * whole() > 0 && comm_.is_device_memory(buffer) != on_device)
      return error(
          moecclInvalidArgument,
          "{} is {} memory, but config.device_memory was {}: give {} memory, or create the gradient return with "
          "{}",
          buffer == held ? "held" : "own", on_device ? "host" : "CUDA", on_device ? 1 : 0, on_device ? "CUDA" : "host",
          on_device ? 0 : 1);
  return on_device ? Status() : comm_.check_reach({held, own});
}

Status GradientReturn::reduce(int number, const void* held, void* own, Stream* stream) {
  MOECCL_TRY(check_layer(number));
  MOECCL_TRY(comm_.usable());
  if (exact()) {
    Call call{.comm = &comm_, .stream = stream, .operation = std::make_unique<exec::Operation>()};
    MOECCL_TRY(
        or_break_off(comm_, stream, hybrid_.prepare_reduce(held, own, codec_.count, codec_.type, *call.operation)));
    return issue(std::move(call));
  }
  MOECCL_TRY(hybrid_.check_buffers(own, held, whole()));
  MOECCL_TRY(check_kind(held, own));
  const auto layer = static_cast<size_t>(number);
  if (CudaStream* cuda = stream != nullptr ? stream->as_cuda() : nullptr; device_ != nullptr && cuda != nullptr)
    return put_on(*cuda, layer, held, own);
  if (stream != nullptr) MOECCL_TRY(stream->ready());
  const std::shared_ptr<Lease> lease = this->lease();
  Flight& flight = lease->flight();
  flight.layer = layer;
  flight.held = static_cast<const std::byte*>(held);
  flight.own = static_cast<std::byte*>(own);
  flight.exchange.reset();
  void* const sent = device_ != nullptr ? device_->sent(layer) : flight.sent.data();
  void* const arrived = device_ != nullptr ? device_->arrived(layer) : flight.arrived.data();
  MOECCL_TRY(or_break_off(comm_, stream, prepare_exchange(sent, arrived, layer, flight.exchange)));
  Communicator::promise(flight.exchange);
  if (stream == nullptr) {
    std::shared_ptr<const exec::EarlierWork> earlier;
    if (device_ != nullptr) {
      MOECCL_ASSIGN_OR_RETURN(earlier, earlier_work(comm_, nullptr));
    }
    return run_after(earlier.get(), [&] { return run(flight, comm_.take_ticket()); });
  }
  return enqueue_in_turn(comm_, *stream, [this, lease](uint64_t ticket) { return run(lease->flight(), ticket); });
}

Status GradientReturn::put_on(CudaStream& stream, size_t layer, const void* held, void* own) {
  Call call{.comm = &comm_, .stream = &stream, .operation = std::make_unique<exec::Operation>()};
  MOECCL_TRY(comm::or_break_off(
      comm_, &stream, prepare_exchange(device_->sent(layer), device_->arrived(layer), layer, *call.operation)));
  MOECCL_ASSIGN_OR_RETURN(const bool captured, stream.capturing());
  // Peers wait for what this rank does not send, or fail to tell it that it took what they sent.
  const auto or_break_off = [&](Status status) {
    if (!status.ok() && !captured) comm_.break_off(status);
    return status;
  };
  MOECCL_TRY(or_break_off(device_->encode(layer, held, stream.stream())));
  MOECCL_TRY(issue(std::move(call)));
  return or_break_off(device_->finish(layer, held, own, stream.stream(), captured));
}

Status GradientReturn::run(Flight& flight, uint64_t ticket) {
  Status encoded = contained([&] { return before_exchange(flight); });
  if (!encoded.ok()) comm_.break_off(encoded);  // peers would wait for what this rank does not send
  // Decoding is part of the turn: who waits for the communicator's operations waits for `own` and the remainders too.
  Status done = comm_.run_in_turn(ticket, flight.exchange, [&] { return after_exchange(flight); });
  return encoded.ok() ? std::move(done) : std::move(encoded);
}

Status GradientReturn::before_exchange(Flight& flight) const {
  if (device_ == nullptr) {
    encode(flight);
    return {};
  }
  MOECCL_TRY(exec::StreamWork::current()->wait_ready(flight.exchange.runner->fabric()));
  MOECCL_TRY(device_->encode(flight.layer, flight.held, device_->stream()));
  return device_->synchronize();
}

Status GradientReturn::after_exchange(Flight& flight) {
  if (device_ == nullptr) {
    MOECCL_TRY(decode(flight));
    keep_remainders(flight);
    return {};
  }
  MOECCL_TRY(device_->finish(flight.layer, flight.held, flight.own, device_->stream(), false));
  return device_->synchronize();
}

void GradientReturn::encode(Flight& flight) const {
  const auto add = codec_.type == moecclFloat32 ? add_remainder<Fp32> : add_remainder<Bf16>;
  const size_t element = moecclTypeSize(codec_.type);
  for (size_t i = 0; i < foreign_.size(); ++i) {
    const std::byte* gradient = flight.held + foreign_[i].held * whole();
    const float* remainder = layers_[flight.layer].remainders.data() + foreign_[i].remainder * codec_.count;
    const auto step = [&](uint32_t, uint64_t first, uint64_t n) {
      add(gradient + first * element, remainder + first, flight.sum.data() + first * element, n);
      return true;
    };
    const kernels::CodecExperts one{flight.sum.data(), zeros_.data(), flight.sent.data() + i * expert_bytes_, nullptr,
                                    1};
    (void)kernels::codec_encode(kernels::best_codec(), codec_, one, step);  // the step never stops it
  }
}

Status GradientReturn::decode(const Flight& flight) const {
  const uint64_t bytes = whole();
  for (size_t e = 0; e < own_held_.size(); ++e) {
    std::byte* const sum = flight.own + e * bytes;
    if (bytes > 0) std::memcpy(sum, flight.held + own_held_[e] * bytes, bytes);
    for (uint32_t r = 0; r < comm_.n_ranks(); ++r) {
      if (r == comm_.rank() || recv_bytes_[r] == 0) continue;
      const std::byte* from = flight.arrived.data() + recv_at_[r] + e * expert_bytes_;
      if (!kernels::codec_decode(codec_, from, expert_bytes_, sum, sum))
        return error(moecclInternalError, "the gradient that rank {} sent for expert {} does not decode", r,
                     hybrid_.own()[e]);
    }
  }
  return {};
}

// Allocates nothing, so it cannot end halfway.
void GradientReturn::keep_remainders(Flight& flight) {
  const auto keep = codec_.type == moecclFloat32 ? keep_remainder<Fp32> : keep_remainder<Bf16>;
  void* const decoded = flight.sum.data();
  for (size_t i = 0; i < foreign_.size(); ++i) {
    const std::byte* sent = flight.sent.data() + i * expert_bytes_;
    (void)kernels::codec_decode(codec_, sent, expert_bytes_, zeros_.data(), decoded);  // encode() wrote it
    keep(flight.held + foreign_[i].held * whole(), decoded,
         layers_[flight.layer].remainders.data() + foreign_[i].remainder * codec_.count, codec_.count);
  }
}

Status GradientReturn::reset(int number) {
  MOECCL_TRY(check_layer(number));
  if (device_ != nullptr) return device_->reset(static_cast<size_t>(number));
  std::vector<float>& remainders = layers_[static_cast<size_t>(number)].remainders;
  std::fill(remainders.begin(), remainders.end(), 0.0f);
  return {};
}

uint64_t GradientReturn::received_bytes() const {
  uint64_t bytes = 0;
  for (uint32_t r = 0; r < recv_bytes_.size(); ++r)
    if (r != comm_.rank()) bytes += recv_bytes_[r];
  return bytes;
}

uint64_t GradientReturn::sent_bytes() const {
  if (!exact()) return foreign_.size() * expert_bytes_;
  // A reduce goes back over the links of the gather.
  uint64_t bytes = 0;
  const algo::Domains& domains = *hybrid_.domains();
  for (const algo::Domains::Send& send : domains.sends())
    if (send.to == comm_.rank())
      for (const uint32_t home : domains.held(send.from, send.level))
        bytes += hybrid_.homes().n_local(home) * expert_bytes_;
  return bytes;
}

Status GradientReturn::info(int number, moecclGradientReturnInfo_t* out) {
  MOECCL_TRY(check_layer(number));
  const auto layer = static_cast<size_t>(number);
  MOECCL_TRY(check_out(out, "info"));
  moecclGradientReturnInfo_t info{};
  info.expert_bytes = expert_bytes_;
  info.sent_bytes = sent_bytes();
  info.n_remainders = static_cast<int32_t>(foreign_.size());
  if (device_ != nullptr) {
    info.remainders = device_->remainders(layer);
    info.memory_bytes = device_->memory_bytes();
  } else if (!exact()) {
    info.remainders = layers_[layer].remainders.data();
    info.memory_bytes = layers_.size() * foreign_.size() * codec_.count * sizeof(float) + zeros_.size() + sent_bytes() +
                        received_bytes() + (foreign_.empty() ? 0 : whole());
  }
  give(info, out);
  return {};
}

}  // namespace moeccl::comm
