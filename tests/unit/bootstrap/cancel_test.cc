// SPDX-License-Identifier: Apache-2.0
// An abort ends a session's wait also in the middle of a message, and a rank that gives up says why.
#include <sys/wait.h>

#include <thread>

#include "src/base/wire.h"
#include "src/bootstrap/control.h"
#include "src/bootstrap/messages.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

Deadline soon() { return Deadline::after_ms(patient_ms(20'000)); }

// Aborts some time after it was made.
struct Abort {
  Deadline begins = Deadline::after_ms(patient_ms(300));
  JoinOptions options() const {
    JoinOptions o;
    o.cancelled = [this] { return begins.passed() ? error(moecclAborted, "aborted by the test") : Status(); };
    return o;
  }
};

// A program that prints the error of rank 0 and exits takes the meeting point with it.
TEST(Cancel, AProcessThatEndsWithTheMeetingPointTellsWhyFirst) {
  for (const bool over_unix : {true, false}) {
    for (int i = 0; i < 20; ++i) {
      auto id_of_child = make_pair_of_sockets();
      Children child;
      child.start([&] {
        std::unique_ptr<Root> root = start_root(patient_ms(20'000), over_unix ? "" : "127.0.0.1");
        const moecclUniqueId id = root->id();
        (void)driver::send_now(id_of_child.second.get(), std::as_bytes(std::span(id.internal)));
        Result<std::unique_ptr<Session>> session = Session::join(id, 0, 3, soon());
        if (!session.ok()) return 1;
        (*session)->abandon(Status(moecclInvalidArgument, "a setting that is wrong"));
        ::_exit(0);
        return 0;
      });
      moecclUniqueId id{};
      ASSERT_TRUE(
          driver::recv_exact(id_of_child.first.get(), std::as_writable_bytes(std::span(id.internal)), soon()).ok());
      const std::vector<Status> results = run_threads(2, [&](int thread) -> Status {
        MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(id, thread + 1, 3, soon()));
        return session->barrier(soon());
      });
      for (const Status& s : results) EXPECT_TRUE(contains(s.message(), "a setting that is wrong")) << s.message();
      EXPECT_EQ(child.wait(0), 0);
    }
  }
}

TEST(Cancel, EndsAMessageThatIsSentInPart) {
  for (const char* address : {"", "127.0.0.1"}) {
    auto channel = make_pair_of_sockets();
    Children host;
    host.start([&] {
      const std::unique_ptr<Root> root = start_root(patient_ms(20'000), address);
      (void)driver::send_now(channel.second.get(), std::as_bytes(std::span(root->id().internal)));
      for (;;) ::pause();
      return 0;
    });
    moecclUniqueId id{};
    ASSERT_TRUE(driver::recv_exact(channel.first.get(), std::as_writable_bytes(std::span(id.internal)), soon()).ok());
    const Abort abort;
    const auto session = Session::join(id, 0, 1, soon(), abort.options());
    ASSERT_TRUE(session.ok()) << session.status().message();
    ::kill(host.pid(0), SIGSTOP);
    int state = 0;
    ASSERT_EQ(::waitpid(host.pid(0), &state, WUNTRACED), host.pid(0));
    const std::vector<std::vector<std::byte>> rows = {blob_of(0, kMaxRowsBytes - 64)};  // more than any buffer holds
    const Stopwatch watch;
    const Status s = (*session)->all_to_all(rows, Deadline::after_ms(patient_ms(5000))).status();
    EXPECT_EQ(s.code(), moecclAborted) << s.message();
    MOECCL_EXPECT_WITHIN(watch, 1000);
  }
}

TEST(Cancel, EndsAMessageThatHasArrivedInPart) {
  UniqueId id;
  id.key = random_key().value();
  id.address = driver::unix_address(format("moeccl-cancel-test-{}", ::getpid()));
  const auto listener = driver::listen_at(id.address);
  ASSERT_TRUE(listener.ok());
  const Abort abort;
  Status ended;
  std::atomic<bool> over{false};
  std::thread root([&] {
    const Result<Fd> fd = tests::accept_until(listener->get(), soon());
    ASSERT_TRUE(fd.ok());
    const auto member = server_handshake(fd->get(), id.key, {Role::kRoot, 0, 1}, Role::kMember, soon());
    ASSERT_TRUE(member.ok()) << member.status().message();
    const SealedPayload list(encode_peers(std::vector<Peer>(1)), random_key().value());
    const ControlHeadBytes sealed = Sealer(member->keys.send).seal(list.head(kDone));
    ASSERT_TRUE(driver::send_all(fd->get(), sealed, soon()).ok());
    eventually([&] { return over.load(); });  // the payload never follows
  });
  const Stopwatch watch;
  ended =
      Session::join(encode_unique_id(id).value(), 0, 1, Deadline::after_ms(patient_ms(4000)), abort.options()).status();
  EXPECT_EQ(ended.code(), moecclAborted) << ended.message();
  MOECCL_EXPECT_WITHIN(watch, 1000);
  over = true;
  root.join();
}

}  // namespace
}  // namespace moeccl::bootstrap
