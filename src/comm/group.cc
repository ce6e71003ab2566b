#include "src/comm/group.h"

#include <algorithm>
#include <map>
#include <thread>
#include <utility>

#include "src/comm/cuda_side.h"
#include "src/comm/cuda_stream.h"

namespace moeccl::comm {
namespace {

// The collectives of one communicator in a batch: one after another.
class ChainTask final : public exec::Task {
 public:
  ChainTask(exec::Fabric& fabric, std::vector<const exec::Operation*> operations)
      : Task(fabric), operations_(std::move(operations)) {}

  exec::Progress poll() override {
    if (running_ == nullptr) {
      const exec::Operation& op = *operations_[next_++];
      if (op.eager) {
        running_ = std::make_unique<exec::Eager>(fabric(), op);
      } else {
        running_ = std::make_unique<exec::Execution>(fabric(), op);
      }
    }
    const exec::Progress p = running_->poll();
    if (p == exec::Progress::kFailed) return fail(running_->status());
    if (p != exec::Progress::kDone || next_ == operations_.size()) return p;
    running_ = nullptr;
    return exec::Progress::kMoved;
  }
  Status diagnose() override { return running_ ? running_->diagnose() : Status(); }
  std::string describe() const override { return running_ ? running_->describe() : "a group of operations"; }
  bool needs(uint32_t peer) const override { return running_ && running_->needs(peer); }
  void abandon() override {
    if (running_) running_->abandon();
  }

 private:
  std::vector<const exec::Operation*> operations_;
  size_t next_ = 0;
  std::unique_ptr<exec::AgreedTask> running_;
};

// What goes to one stream, or to this thread, together.
struct Batch {
  std::vector<Call> calls;
  std::vector<std::pair<Communicator*, uint64_t>> turns;  // tickets, taken when the batch is made
};

void add_messages(const Batch& batch, std::vector<std::unique_ptr<exec::Task>>& tasks) {
  std::map<std::tuple<Communicator*, bool, uint32_t, bool>, const exec::MessageTask*> newest;
  std::map<Communicator*, std::vector<const exec::Message*>> own_sends;
  for (const Call& c : batch.calls) {
    if (c.operation != nullptr) continue;
    if (c.message.peer == c.comm->rank()) {
      if (c.message.is_send) own_sends[c.comm].push_back(&c.message);
      continue;
    }
    const auto key = std::tuple(c.comm, c.message.cuda, c.message.peer, c.message.is_send);
    auto task = std::make_unique<exec::MessageTask>(c.comm->fabric_for(c.message.cuda), c.message, newest[key]);
    newest[key] = task.get();
    tasks.push_back(c.comm->task_for(c.message.cuda, std::move(task)));
  }
  for (const Call& c : batch.calls) {
    if (c.operation != nullptr || c.message.peer != c.comm->rank() || c.message.is_send) continue;
    auto& sends = own_sends[c.comm];  // issue() has checked that they pair up
    tasks.push_back(c.comm->task_for(
        c.message.cuda,
        std::make_unique<exec::SelfMessageTask>(c.comm->fabric_for(c.message.cuda), *sends.front(), c.message)));
    sends.erase(sends.begin());
  }
}

std::vector<CudaSide*> cuda_sides(const Batch& batch) {
  std::vector<CudaSide*> sides;
  for (const Call& c : batch.calls) {
    const bool on_device = c.operation != nullptr ? c.operation->cuda : c.message.cuda;
    if (on_device && std::find(sides.begin(), sides.end(), c.comm->cuda()) == sides.end())
      sides.push_back(c.comm->cuda());
  }
  return sides;
}

Status run(const Batch& batch) {
  Status status;
  for (const auto& [comm, ticket] : batch.turns) {
    MOECCL_TRY(comm->wait_turn(ticket));
    if (Status s = comm->usable(); !s.ok() && status.ok()) status = s;
  }
  if (status.ok()) {
    std::vector<std::unique_ptr<exec::Task>> tasks;
    // Operations on host memory and on CUDA memory are two chains.
    using Key = std::pair<Communicator*, bool>;
    std::vector<std::pair<Key, std::vector<const exec::Operation*>>> chains;
    for (const Call& c : batch.calls) {
      if (c.operation == nullptr) continue;
      const Key key{c.comm, c.operation->cuda};
      auto it = std::find_if(chains.begin(), chains.end(), [&](const auto& chain) { return chain.first == key; });
      if (it == chains.end()) it = chains.insert(chains.end(), {key, {}});
      it->second.push_back(c.operation.get());
    }
    for (auto& [key, operations] : chains) {
      tasks.push_back(key.first->task_for(
          key.second, std::make_unique<ChainTask>(key.first->fabric_for(key.second), std::move(operations))));
    }
    add_messages(batch, tasks);
    std::vector<exec::Task*> pointers;
    for (const auto& t : tasks) pointers.push_back(t.get());
    const std::vector<CudaSide*> sides = cuda_sides(batch);
    if (StreamWork* work = StreamWork::current(); work != nullptr && sides.empty()) status = work->wait_ready();
    for (CudaSide* side : sides) {
      if (status.ok()) status = side->begin();
    }
    if (status.ok()) status = exec::drive(pointers);
    for (CudaSide* side : sides) status = side->end(std::move(status));
  }
  for (const auto& [comm, ticket] : batch.turns) {
    if (!status.ok()) comm->set_last_error(status.message());
    comm->end_turn();
  }
  return status;
}

Status check_self_messages(const std::vector<Call>& calls) {
  std::map<Communicator*, int> open;
  for (const Call& c : calls) {
    if (c.operation == nullptr && c.message.peer == c.comm->rank()) open[c.comm] += c.message.is_send ? 1 : -1;
  }
  for (const auto& [comm, count] : open) {
    if (count != 0) {
      return error(moecclInvalidUsage,
                   "rank {} sends to itself and receives from itself unequally often: put both calls in one group",
                   comm->rank());
    }
  }
  return {};
}

}  // namespace

Status issue(std::vector<Call> calls) {
  MOECCL_TRY(check_self_messages(calls));
  for (const Call& c : calls) {
    if (c.stream != nullptr) MOECCL_TRY(c.stream->ready());
  }
  std::vector<std::pair<Stream*, std::shared_ptr<Batch>>> batches;
  for (Call& c : calls) {
    auto it = std::find_if(batches.begin(), batches.end(), [&](const auto& b) { return b.first == c.stream; });
    if (it == batches.end()) it = batches.insert(batches.end(), {c.stream, std::make_shared<Batch>()});
    auto& turns = it->second->turns;
    Communicator* comm = c.comm;
    if (std::none_of(turns.begin(), turns.end(), [&](const auto& t) { return t.first == comm; })) {
      turns.emplace_back(comm, comm->take_ticket());
    }
    it->second->calls.push_back(std::move(c));
  }
  Status status;
  for (auto& [stream, batch] : batches) {
    if (stream == nullptr) continue;
    Status s = stream->enqueue([batch = batch] { return run(*batch); });
    if (status.ok()) status = std::move(s);
  }
  for (auto& [stream, batch] : batches) {
    if (stream != nullptr) continue;
    Status s = run(*batch);
    if (status.ok()) status = std::move(s);
  }
  return status;
}

Group& Group::of_this_thread() {
  static thread_local Group group;
  return group;
}

Status Group::end() {
  if (depth_ == 0) return error(moecclInvalidUsage, "moecclGroupEnd without moecclGroupStart");
  if (--depth_ > 0) return {};
  Status failure = std::exchange(failure_, Status());
  auto joins = std::exchange(joins_, {});
  auto calls = std::exchange(calls_, {});
  if (!failure.ok()) return failure;
  if (!joins.empty()) {
    std::vector<Status> results(joins.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < joins.size(); ++i) threads.emplace_back([&, i] { results[i] = joins[i](); });
    for (auto& t : threads) t.join();
    for (Status& s : results) MOECCL_TRY(std::move(s));
  }
  return calls.empty() ? Status() : issue(std::move(calls));
}

}  // namespace moeccl::comm
