// SPDX-License-Identifier: Apache-2.0
#include "src/comm/group.h"

#include <map>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include "src/base/per_thread.h"
#include "src/comm/batches.h"
#include "src/comm/cuda_stream.h"
#include "src/driver/fork_page.h"
#include "src/driver/thread.h"
#include "src/exec/cuda/kernel_task.h"
#include "src/exec/cuda/messages/message_kernel_task.h"

namespace moeccl::comm {
namespace {

// The calls of one communicator in a batch, on one kind of memory, that run one after another: its collectives, and
// then the messages that a launch moves. As in NCCL, these come last: the launch ends when its peers' do, which may
// come behind any of the collectives.
class ChainTask final : public exec::Task {
 public:
  ChainTask(exec::Fabric& fabric, std::vector<Call*> calls, std::unique_ptr<exec::Task> messages)
      : Task(fabric), calls_(std::move(calls)), messages_(std::move(messages)) {}

  exec::Progress poll() override {
    if (running_ == nullptr && next_ == calls_.size()) {
      running_ = std::move(messages_);
    } else if (running_ == nullptr) {
      Call& call = *calls_[next_++];
      if (Status s = call.comm->refresh(*call.operation); !s.ok()) return fail(std::move(s));
      running_ = call.runner().task(*call.operation);
      call.promise = nullptr;  // the task has one of its own
    }
    const exec::Progress p = running_->poll();
    if (p == exec::Progress::kFailed) return fail(running_->status());
    if (p != exec::Progress::kDone || (next_ == calls_.size() && messages_ == nullptr)) return p;
    running_ = nullptr;
    return exec::Progress::kMoved;
  }
  Status diagnose() override { return running_ ? running_->diagnose() : Status(); }
  std::string describe() const override { return running_ ? running_->describe() : "a group of operations"; }
  uint64_t sequence() const override { return running_ ? running_->sequence() : 0; }
  uint32_t awaits() const override { return running_ ? running_->awaits() : transport::Engine::kAnyone; }
  bool needs(uint32_t peer) const override { return running_ && running_->needs(peer); }
  bool has_entered(uint32_t peer) const override { return running_ && running_->has_entered(peer); }
  int64_t deadline_ns(int64_t since_ns) const override {
    return running_ ? running_->deadline_ns(since_ns) : Task::deadline_ns(since_ns);
  }
  void stop() override {
    if (running_) running_->stop();
  }
  void let_go() override {
    if (running_) running_->let_go();
    for (; next_ < calls_.size(); ++next_) calls_[next_]->promise = nullptr;
    messages_ = nullptr;
  }
  void abandon() override {
    if (running_) running_->abandon();
  }

 private:
  std::vector<Call*> calls_;
  size_t next_ = 0;
  std::unique_ptr<exec::Task> messages_, running_;
};

// Returns whether a launch moves the call's message. The rank's messages to itself are copied.
bool is_launched_message(const Call& c) {
  return c.operation == nullptr && c.message.peer != c.comm->rank() && kernel_of(c) != nullptr;
}

// Returns the launch of one communicator's messages, or null if there are none.
std::unique_ptr<exec::Task> launch_of(const std::vector<Call*>& calls) {
  if (calls.empty()) return nullptr;
  std::vector<exec::Message> messages;
  for (const Call* c : calls) messages.push_back(c->message);
  const Call& first = *calls.front();
  auto task =
      std::make_unique<exec::MessageKernelTask>(first.runner().fabric(), *kernel_of(first), std::move(messages), 0);
  for (Call* c : calls) c->promise = nullptr;  // the task has one of its own
  return task;
}

// The messages of a rank to itself: sends and receives of one communicator, in order of their calls.
struct OwnMessages {
  std::vector<const exec::Message*> sends, receives;
};

std::map<Communicator*, OwnMessages> own_messages(const std::vector<Call>& calls) {
  std::map<Communicator*, OwnMessages> all;
  for (const Call& c : calls) {
    if (c.operation != nullptr || c.message.peer != c.comm->rank()) continue;
    OwnMessages& own = all[c.comm];
    (c.message.is_send ? own.sends : own.receives).push_back(&c.message);
  }
  return all;
}

// Adds the messages that a thread drives.
void add_messages(Batch& batch, std::vector<std::unique_ptr<exec::Task>>& tasks) {
  std::map<std::tuple<exec::Runner*, uint32_t, bool>, const exec::MessageTask*> newest;
  for (Call& c : batch.calls) {
    if (c.operation != nullptr || c.message.peer == c.comm->rank() || is_launched_message(c)) continue;
    exec::Runner& runner = c.runner();
    const exec::MessageTask*& before = newest[std::tuple(&runner, c.message.peer, c.message.is_send)];
    auto task = std::make_unique<exec::MessageTask>(runner.fabric(), c.message, before);
    before = task.get();
    tasks.push_back(runner.driven(std::move(task)));
  }
  for (const auto& [comm, own] : own_messages(batch.calls)) {
    for (size_t i = 0; i < own.sends.size(); ++i) {  // check_self_messages() has checked that they pair up
      const exec::Message &sent = *own.sends[i], &received = *own.receives[i];
      // If one buffer is CUDA memory, the device copies.
      exec::Runner& runner = sent.runner->on_device() ? *sent.runner : *received.runner;
      tasks.push_back(runner.driven(std::make_unique<exec::SelfMessageTask>(runner.fabric(), sent, received)));
    }
  }
}

// Runs `body` (Status of the batch's state so far) when all turns have come, and then ends the turns.
template <class Body>
Status in_turns(Batch& batch, Body&& body) {
  for (size_t i = 0; i < batch.turns.size() && batch.is_queued(); ++i) {
    batch.turns[i].comes = batch.turns[i].comm->begin_queued();
    if (batch.turns[i].comes) batch.holds[i] = nullptr;  // until the turn ends, Destroy waits for it
  }
  for (const Batch::Turn& turn : batch.turns)
    if (turn.comes) turn.comm->wait_turn(turn.ticket);
  bool threw = true;
  Status status = contained([&]() -> Status {
    Status usable;
    for (const Batch::Turn& turn : batch.turns)
      if (usable.ok()) usable = turn.comm->usable();
    Status s = body(std::move(usable));
    threw = false;
    return s;
  });
  if (exec::StreamWork* work = exec::StreamWork::current(); work != nullptr) work->end(status);
  for (const Batch::Turn& turn : batch.turns) {
    if (threw) turn.comm->break_off(status);  // peers would wait for the rest
    if (!status.ok()) turn.comm->set_last_error(status.message());
    if (turn.comes) turn.comm->end_turn();
  }
  return status;
}

// Waits until the calls that were launched on the caller's stream have ended, and stops them if they must not continue.
Status watch(const Batch& batch, Status status) {
  if (status.ok() && !batch.launched.ok()) {
    for (const Call& c : batch.calls) c.runner().fabric().fail(batch.launched);
    status = batch.launched;
  }
  std::vector<std::unique_ptr<exec::Task>> tasks;
  std::vector<exec::Task*> pointers;
  for (size_t i = 0; i < batch.walks.size(); ++i) {
    const Call& c = batch.calls[i];
    // Its abort has stopped the kernel, and others may be in their turns.
    if (!batch.comes(*c.comm)) continue;
    exec::Fabric& fabric = c.runner().fabric();
    if (batch.has_messages())
      tasks.push_back(
          std::make_unique<exec::MessageKernelTask>(fabric, *kernel_of(c), batch.messages(), batch.walks[i]));
    else
      tasks.push_back(std::make_unique<exec::KernelTask>(fabric, *kernel_of(c), *c.operation, batch.walks[i]));
    pointers.push_back(tasks.back().get());
  }
  // Also after a failure, because the caller may use the buffers again only when the kernels have finished.
  if (Status s = exec::drive(pointers); status.ok()) status = std::move(s);
  return status;
}

// Returns the fabrics of the batch's calls. If one of them fails, none of the calls need wait for a stream any more.
std::vector<const exec::Fabric*> fabrics_of(const Batch& batch) {
  std::vector<const exec::Fabric*> all;
  for (const Call& c : batch.calls)
    if (std::find(all.begin(), all.end(), &c.runner().fabric()) == all.end()) all.push_back(&c.runner().fabric());
  return all;
}

// Drives all calls on this thread. Each kind of memory of each communicator is driven separately.
Status run(Batch& batch, Status status) {
  if (const exec::StreamWork* work = exec::StreamWork::current(); work != nullptr && status.ok())
    status = work->wait_ready(fabrics_of(batch));
  if (!status.ok()) {
    // Nothing runs. On the other communicators, peers would wait for this rank, or take its next call for this one.
    const Status skipped =
        error(moecclRemoteError, "a group was not run because one of its communicators failed: {}", status.message());
    for (const Batch::Turn& turn : batch.turns) {
      const Status own = turn.comm->usable();  // one that has failed, or is being aborted, reports that
      turn.comm->break_off(own.ok() ? skipped : own);
    }
    return status;
  }
  std::vector<exec::Runner*> memories;               // one for each kind of memory
  std::vector<std::vector<Call*>> chains, launched;  // [memories]
  for (Call& c : batch.calls) {
    size_t i = 0;
    while (i < memories.size() && &memories[i]->fabric() != &c.runner().fabric()) ++i;
    if (i == memories.size()) memories.push_back(&c.runner()), chains.emplace_back(), launched.emplace_back();
    if (c.operation != nullptr) chains[i].push_back(&c);
    if (is_launched_message(c)) launched[i].push_back(&c);
  }
  std::vector<std::unique_ptr<exec::Task>> tasks;
  for (size_t i = 0; i < chains.size(); ++i) {
    if (chains[i].empty() && launched[i].empty()) continue;
    tasks.push_back(memories[i]->driven(
        std::make_unique<ChainTask>(memories[i]->fabric(), std::move(chains[i]), launch_of(launched[i]))));
  }
  add_messages(batch, tasks);
  std::vector<exec::Task*> pointers;
  for (const auto& t : tasks) pointers.push_back(t.get());
  for (exec::Runner* runner : memories) {
    if (status.ok()) status = runner->begin();
  }
  if (status.ok()) {
    status = exec::drive(pointers);
  } else {  // nothing ran, and peers would wait for this rank, or take its next call for this one
    for (exec::Runner* runner : memories) runner->fabric().fail(status);
  }
  for (exec::Runner* runner : memories) status = runner->end(std::move(status));
  return status;
}

Status check_self_messages(const std::vector<Call>& calls) {
  for (const auto& [comm, own] : own_messages(calls)) {
    if (own.sends.size() != own.receives.size()) {
      return error(moecclInvalidUsage,
                   "rank {} does not send to itself as often as it receives from itself: put both calls in one group",
                   comm->rank());
    }
    for (size_t i = 0; i < own.sends.size(); ++i) {
      const exec::Message &sent = *own.sends[i], &received = *own.receives[i];
      if (sent.runner == received.runner || sent.bytes == 0) continue;
      const exec::Message& on_host = sent.runner->on_device() ? received : sent;
      if (driver::cuda::pointed(on_host.data).type != 0) continue;
      return error(moecclInvalidArgument,
                   "rank {} sends {} bytes to itself between CUDA memory and ordinary host memory: give two buffers of "
                   "a kind (page-locked memory goes with both)",
                   comm->rank(), sent.bytes);
    }
  }
  return {};
}

// Ends the promises of a batch that has run, or will not: they refer to its communicators, which may end once the
// batch's turns have.
struct PromisesEnd {
  Batch& batch;
  ~PromisesEnd() {
    for (Call& c : batch.calls) c.promise = nullptr;
  }
};

// Runs the calls when their streams and turns have come.
Status drive(Batch& batch) {
  Status met;
  if (batch.meeting != nullptr) {
    met = batch.meeting->gather();
    // The other streams do not see how far this one has got on the device.
    if (exec::StreamWork* work = exec::StreamWork::current(); work != nullptr) work->blocks = true;
  }
  exec::StreamWork after;
  after.blocks = true;
  std::optional<exec::StreamWork::Scope> scope;
  if (!batch.earlier.empty()) scope.emplace(after);
  const Status status = in_turns(batch, [&](Status usable) {
    const PromisesEnd end{batch};
    if (exec::StreamWork* work = exec::StreamWork::current(); work != nullptr && batch.meeting != nullptr)
      work->let_others_go = [&] { batch.meeting->end(error(moecclRemoteError, "a call of the group has failed")); };
    if (usable.ok()) usable = std::move(met);
    for (const auto& earlier : batch.earlier)
      if (usable.ok()) usable = earlier->wait(fabrics_of(batch));
    return run(batch, std::move(usable));
  });
  if (batch.meeting != nullptr) batch.meeting->end(status);
  return status;
}

// What the i-th other stream of a batch does in the batch's place.
Status attend(Batch& batch, size_t i) {
  const exec::StreamWork* work = exec::StreamWork::current();
  const Status arrival = work != nullptr ? work->wait_ready(fabrics_of(batch)) : Status();
  batch.holds_of_others[i].clear();  // from now on, Destroy waits for the batch
  return batch.meeting->attend(arrival);
}

// The work of a batch that is put on streams.
struct PutWork {
  std::vector<Stream::Work> of_others;
  Stream::Work own;
};

PutWork put_work_of(const std::shared_ptr<Batch>& batch) {
  PutWork works;
  if (batch->is_launched()) {
    works.own = batch->stream->as_cuda()->hold_watch([batch] {
      Status status = in_turns(*batch, [&](Status usable) { return watch(*batch, std::move(usable)); });
      batch->in_flight.reset();
      return status;
    });
    return works;
  }
  if (batch->stream != nullptr) works.own = batch->stream->hold([batch] { return drive(*batch); });
  for (size_t i = 0; i < batch->others.size(); ++i) {
    std::vector<Communicator::Hold>& holds = batch->holds_of_others.emplace_back();
    for (const Call& c : batch->calls) holds.push_back(c.comm->hold());
    works.of_others.push_back(batch->others[i]->hold([batch, i] { return attend(*batch, i); }));
  }
  return works;
}

void keep_first(Status& failure, Status next) {
  if (failure.ok()) failure = std::move(next);
}

// Returns the first failure.
Status put(Batch& batch, PutWork work) {
  if (batch.is_launched()) {
    batch.stream->as_cuda()->watch(std::move(work.own));
    return {};
  }
  const auto lock = order_on(batch.stream, batch.others.size());
  if (!batch.others.empty()) {
    if (batch.stream != nullptr) batch.stream->note_earlier(work.own);
    for (size_t i = 0; i < batch.others.size(); ++i) batch.others[i]->note_earlier(work.of_others[i]);
  }
  Status status;
  if (batch.stream != nullptr) status = batch.stream->enqueue(std::move(work.own));
  for (size_t i = 0; i < batch.others.size(); ++i)
    keep_first(status, batch.others[i]->enqueue(std::move(work.of_others[i])));
  return status;
}

// Does everything that can fail before tickets are taken.
Status prepare_batches(std::vector<Call>& calls, Batches& batches, std::vector<PutWork>& works) {
  MOECCL_TRY(check_self_messages(calls));
  MOECCL_ASSIGN_OR_RETURN(batches, batches_of(calls));
  for (const auto& batch : batches) {
    if (batch->launchable) continue;
    if (batch->stream != nullptr) MOECCL_TRY(batch->stream->ready());
    for (Stream* other : batch->others) MOECCL_TRY(other->ready());
    MOECCL_TRY(batch->note_earlier_work());
  }
  for (const auto& batch : batches)
    if (batch->launchable && !batch->captured) batch->in_flight.emplace();
  MOECCL_TRY(launch_at_once(batches));  // last, because a failure after it would leave the launches unwatched
  for (const auto& batch : batches) {
    if (!batch->is_launched()) batch->in_flight.reset();
    batch->turns.reserve(batch->calls.size());
    batch->holds.reserve(batch->calls.size());
    works.push_back(put_work_of(batch));
  }
  return {};
}

// Tells the communicators of calls that were not issued why.
Status not_issued(const std::vector<Call>& calls, Status why) {
  for (const Call& c : calls) c.comm->set_last_error(why.message());
  return why;
}

Status issue_batches(std::vector<Call>& calls) {
  Batches batches;
  std::vector<PutWork> works;
  if (Status s = prepare_batches(calls, batches, works); !s.ok()) return not_issued(calls, std::move(s));
  for (auto& batch : batches) batch->take_turns();
  Status status;
  for (size_t i = 0; i < batches.size(); ++i) keep_first(status, put(*batches[i], std::move(works[i])));
  for (auto& batch : batches)
    if (batch->stream == nullptr) keep_first(status, drive(*batch));
  for (auto& batch : batches) {
    if (batch->stream != nullptr) batch->stream->settle();
    for (Stream* other : batch->others) other->settle();
  }
  return status;
}

// Runs joins side by side. They begin once every thread has started; if one cannot start, none begins.
Status run_joins(const std::vector<std::function<Status()>>& joins) {
  enum : int { kWaits, kBegins, kEnds };
  std::vector<Status> results(joins.size());
  std::vector<std::thread> threads;
  threads.reserve(joins.size());
  std::atomic<int> gate{kWaits};
  Status started;
  for (size_t i = 0; i < joins.size() && started.ok(); ++i) {
    started = contained([&]() -> Status {
      MOECCL_ASSIGN_OR_RETURN(std::thread thread, driver::start_thread("moeccl-join", [&, i] {
                                gate.wait(kWaits);
                                if (gate == kBegins) results[i] = contained(joins[i]);
                              }));
      threads.push_back(std::move(thread));
      return {};
    });
  }
  gate = started.ok() ? kBegins : kEnds;
  gate.notify_all();
  for (auto& t : threads) t.join();
  MOECCL_TRY(std::move(started));
  for (Status& s : results) MOECCL_TRY(std::move(s));
  return {};
}

// Issues calls together. Those without a stream have run when it returns.
Status issue_all(std::vector<Call> calls) {
  try {
    return issue_batches(calls);
  } catch (const std::exception& e) {
    Status status = caught(e);
    for (const Call& c : calls) c.comm->break_off(status);  // peers would wait for what was not issued
    return not_issued(calls, std::move(status));
  }
}

}  // namespace

Result<std::shared_ptr<const exec::EarlierWork>> earlier_work(Communicator& comm, Stream* stream) {
  if (comm.cuda() == nullptr || (stream != nullptr && stream->as_cuda() != nullptr))
    return std::shared_ptr<const exec::EarlierWork>();
  return exec::EarlierWork::of_default_stream(comm.cuda()->engine().context());
}

std::unique_lock<std::mutex> order_on(Stream* stream, size_t n_others) {
  static constinit driver::PerProcess<std::mutex> own;
  const bool on_host = stream != nullptr && stream->as_cuda() == nullptr;
  return n_others > 0 || on_host ? std::unique_lock(own.get()) : std::unique_lock<std::mutex>();
}

Status issue(Call call) {
  if (Group& group = Group::of_this_thread(); group.open()) {
    group.add(std::move(call));
    return {};
  }
  if (call.stream == nullptr && call.operation != nullptr)
    return call.comm->run_in_turn(call.comm->take_ticket(), *call.operation);
  if (call.stream == nullptr && !call.runner().on_device() && call.message.peer != call.comm->rank())
    return call.comm->run_message(call.message);
  std::vector<Call> calls;
  calls.push_back(std::move(call));
  return issue_all(std::move(calls));
}

Status outside_groups(const char* call) {
  if (!Group::open_here()) return {};
  Status refused = error(moecclInvalidUsage,
                         "{} waits for other ranks and cannot be part of a group: call it outside moecclGroupStart and "
                         "moecclGroupEnd",
                         call);
  Group::of_this_thread().poison(refused);
  return refused;
}

Group& Group::of_this_thread() { return PerThread<Group, Group>::get(); }

void Group::start() {
  if (depth_++ > 0) return;
  n_open_.fetch_add(1, std::memory_order_relaxed);
  process_ = driver::process_number();
}

void Group::add(Call call) {
  calls_.push_back(std::move(call));
  const Call& c = calls_.back();
  c.comm->group_holds().add();
  if (c.stream != nullptr) c.stream->group_holds().add();
  if (c.maker != nullptr) c.maker->add();
}

std::vector<Call> Group::take_calls() {
  for (const Call& c : calls_) {
    c.comm->group_holds().remove();
    if (c.stream != nullptr) c.stream->group_holds().remove();
    if (c.maker != nullptr) c.maker->remove();
  }
  return std::exchange(calls_, {});
}

bool Group::cancel() {
  if (depth_ == 0) return false;
  depth_ = 0;
  n_open_.fetch_sub(1, std::memory_order_relaxed);
  failure_ = {};
  joins_.clear();
  take_calls();
  return true;
}

Status Group::end() {
  if (depth_ == 0) return error(moecclInvalidUsage, "moecclGroupEnd without moecclGroupStart");
  if (--depth_ > 0) return {};
  n_open_.fetch_sub(1, std::memory_order_relaxed);
  Status failure = std::exchange(failure_, Status());
  auto joins = std::exchange(joins_, {});
  auto calls = take_calls();
  if (process_ != driver::process_number()) {
    return error(moecclInvalidUsage,
                 "the group was opened in the process that this one was forked from: its calls were dropped");
  }
  if (!failure.ok()) return not_issued(calls, std::move(failure));
  // Peers of the other communicators wait for these calls, whatever becomes of the new ones.
  const Status joined = joins.empty() ? Status() : run_joins(joins);
  Status issued = calls.empty() ? Status() : issue_all(std::move(calls));
  return joined.ok() ? issued : joined;
}

}  // namespace moeccl::comm
