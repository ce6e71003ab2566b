// SPDX-License-Identifier: Apache-2.0
// Specifics of transport/verbs, on the fake libibverbs: addresses, errors that name their cause, and that
// nothing is left behind. link_contract_test.cc tests what every link promises.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>

#include "src/driver/ibv_abi.h"
#include "tests/support/fake_verbs.h"
#include "tests/support/network_fabrics.h"
#include "transport/verbs/bounce_ring.h"
#include "transport/verbs/gid.h"
#include "transport/verbs/offer.h"
#include "transport/verbs/rail.h"
#include "transport/verbs/regions.h"

namespace moeccl::tests {
namespace {

using namespace transport::verbs;
using transport::PutState;
namespace abi = driver::ibv_abi;

TEST(VerbsSettings, RetriesEndWithinHalfOfAnOperationsTimeout) {
  Env s;
  EXPECT_EQ(timeout_code(s, 600'000), 20);
  for (const int64_t ms : {2'000, 5'000, 20'000, 60'000}) {
    const double all_ms = 0.004096 * static_cast<double>(1u << timeout_code(s, ms)) * 8;
    EXPECT_LE(all_ms, static_cast<double>(ms) / 2);
    EXPECT_GT(all_ms * 2, static_cast<double>(ms) / 2) << "but not earlier than it must";
  }
  s.ib_timeout = 22;
  EXPECT_EQ(timeout_code(s, 1000), 22) << "what a user says counts";
}

TEST(VerbsSettings, TheFilterOfDevicesReadsNcclsSyntax) {
  EXPECT_TRUE(admits("", "mlx5_3", 1));
  EXPECT_TRUE(admits("mlx5", "mlx5_10", 2));
  EXPECT_FALSE(admits("mlx5", "bnxt_re0", 1));
  EXPECT_TRUE(admits("mlx5_1", "mlx5_10", 1)) << "a prefix";
  EXPECT_FALSE(admits("=mlx5_1", "mlx5_10", 1));
  EXPECT_TRUE(admits("=mlx5_1:2,mlx5_3", "mlx5_1", 2));
  EXPECT_FALSE(admits("=mlx5_1:2,mlx5_3", "mlx5_1", 1));
  EXPECT_FALSE(admits("^mlx5_1", "mlx5_10", 1));
  EXPECT_TRUE(admits("^=mlx5_1", "mlx5_10", 1));
  EXPECT_FALSE(admits("^=mlx5_1:1", "mlx5_1", 1));
  EXPECT_TRUE(admits("^=mlx5_1:1", "mlx5_1", 2));
}

GidChoice gid(uint32_t index, GidKind kind, std::initializer_list<int> last) {
  GidChoice g;
  g.index = index;
  g.kind = kind;
  size_t at = 16 - last.size();
  for (const int b : last) g.gid.raw[at++] = static_cast<uint8_t>(b);
  return g;
}

TEST(VerbsGid, IsTheRoutableOneOfRoceV2) {
  GidChoice link_v1 = gid(0, GidKind::kRoceV1, {1}), link_v2 = gid(1, GidKind::kRoceV2, {1});
  for (GidChoice* g : {&link_v1, &link_v2}) {
    g->gid.raw[0] = 0xfe;
    g->gid.raw[1] = 0x80;
  }
  GidChoice ip6 = gid(4, GidKind::kRoceV2, {9});
  ip6.gid.raw[0] = 0x20;
  const GidChoice table[] = {link_v1,
                             link_v2,
                             gid(2, GidKind::kRoceV1, {255, 255, 10, 0, 0, 1}),
                             gid(3, GidKind::kRoceV2, {255, 255, 10, 0, 0, 1}),
                             ip6,
                             gid(5, GidKind::kRoceV2, {255, 255, 169, 254, 0, 1})};
  EXPECT_EQ(choose_gid(table, true, -1)->index, 3u);
  EXPECT_EQ(text_of(choose_gid(table, true, -1)->gid), "10.0.0.1");
  const GidChoice without_ip4[] = {link_v1, link_v2, ip6};
  EXPECT_EQ(choose_gid(without_ip4, true, -1)->index, 4u) << "a host of IPv6 alone";
  const GidChoice local[] = {link_v1, link_v2};
  EXPECT_EQ(choose_gid(local, true, -1)->index, 1u) << "one wire needs no router";
  EXPECT_EQ(choose_gid(table, true, 2)->index, 2u) << "as the user says";
  EXPECT_EQ(choose_gid(table, false, -1)->index, 0u);
  const auto missing = choose_gid(local, true, 3);
  ASSERT_FALSE(missing.ok());
  EXPECT_NE(missing.status().message().find("MOECCL_IB_GID_INDEX is 3"), std::string::npos);
  EXPECT_NE(missing.status().message().find("1 (fe80"), std::string::npos) << "says what there is";
  EXPECT_FALSE(choose_gid({}, true, -1).ok());
}

TEST(VerbsRing, GivesEachByteToOneAndInOrder) {
  std::vector<std::byte> memory(1024);
  BounceRing ring(memory.data(), memory.size(), 64);
  std::vector<bool> done(10'000);
  std::deque<std::pair<std::byte*, size_t>> used;
  uint64_t number = 0, ended = 0;
  uint32_t random = 1;
  for (int i = 0; i < 5000; ++i) {
    random = random * 1664525u + 1013904223u;
    const size_t bytes = 1 + (random >> 8) % 400;
    std::byte* const room = ring.take(bytes);
    if (room != nullptr) {
      ASSERT_GE(room, memory.data());
      ASSERT_LE(room + bytes, memory.data() + memory.size());
      for (const auto& [base, length] : used) ASSERT_TRUE(room + bytes <= base || base + length <= room);
      ring.sent(bytes, 0, ++number);
      used.emplace_back(room, bytes);
    }
    if (room == nullptr || (random >> 20) % 3 == 0) {
      ASSERT_FALSE(used.empty()) << "an empty ring has room";
      used.pop_front();
      ++ended;
      ring.give_back([&](uint32_t, uint64_t n) { return n <= ended; });
    }
  }
  EXPECT_GT(number, 2000u);
  EXPECT_EQ(ring.take(1025), nullptr);
}

// A put over several queue pairs sends its room in pieces of any size, so the room that comes back may end anywhere.
TEST(VerbsRing, RoomsThatAreSentInPiecesStayApart) {
  std::vector<std::byte> memory(1024);
  BounceRing ring(memory.data(), memory.size(), 64);
  const auto send = [&](size_t bytes, size_t first) {
    std::byte* const room = ring.take(bytes);
    ASSERT_NE(room, nullptr);
    ring.sent(first, 0, 1);
    if (first < bytes) ring.sent(bytes - first, 1, 2);
  };
  send(512, 100);
  send(512, 512);
  ring.give_back([](uint32_t lane, uint64_t) { return lane == 0; });  // bytes 0 to 100
  std::byte* const room = ring.take(90);
  if (room != nullptr) ring.sent(90, 0, 3);
  std::byte* const next = ring.take(200);
  EXPECT_EQ(next, nullptr) << "at " << next - memory.data() << ", which is under way";
}

// Where one queue pair is held up, others go on, and what they have sent comes back only after it.
TEST(VerbsRing, HoldsNoMorePiecesThanItHasPlacesFor) {
  std::vector<std::byte> memory(4096);
  BounceRing ring(memory.data(), memory.size(), 4);
  for (uint64_t i = 1; i <= 4; ++i) {
    ASSERT_NE(ring.take(64), nullptr);
    ring.sent(64, i == 1 ? 0 : 1, i);
  }
  ring.give_back([](uint32_t lane, uint64_t) { return lane == 1; });
  EXPECT_EQ(ring.take(64), nullptr);
  EXPECT_EQ(ring.oldest().number, 1u);
  ring.give_back([](uint32_t, uint64_t) { return true; });
  EXPECT_NE(ring.take(64), nullptr);
}

class Verbs : public OverFakeVerbs {
 protected:
  static Status put(exec::Fabric& f, uint32_t to, uint64_t offset, const void* src, size_t bytes) {
    for (const Deadline d = Deadline::after_ms(patient_ms(20'000)); !d.passed();) {
      const Result<PutState> state = f.link(to).put(offset, src, bytes);
      if (!state.ok()) return state.status();
      if (*state == PutState::kDone) return {};
      f.engine->progress();
    }
    return error(moecclTimeout, "the put does not end");
  }
  static std::string lost(exec::Fabric& f, uint32_t peer) {
    EXPECT_TRUE(until(f, [&] { return !f.link(peer).check_peer().ok(); }));
    return f.link(peer).check_peer().message();
  }
};

TEST_F(Verbs, ThousandsOfPutsNeverFillAQueueBeyondItsDepth) {
  NetworkFabrics ranks(fake_verbs::kNetworks[1], 2);  // three queue pairs on each of two rails
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  fake().control().set_delay_us(2000);  // so that requests pile up, however slow this rank is
  std::vector<std::byte> data(1 << 20, std::byte{5});
  uint32_t random = 1;
  ranks[0].engine->begin();
  for (uint32_t i = 1; i <= 3000; ++i) {
    random = random * 1664525u + 1013904223u;
    const size_t bytes = i % 50 == 0 ? 1 + random % data.size() : 1 + (random >> 8) % 2000;
    ASSERT_TRUE(put(ranks[0], 1, 0, data.data(), bytes).ok());
    if (i % 3 == 0) {
      ASSERT_TRUE(ranks[0].link(1).signal(0, i, 1).ok());
    }
  }
  ASSERT_TRUE(until(ranks[0], [&] { return (ranks[1].own->signal(0, 0).word.load() & 0xffffffff) == 3000; }));
  ranks[0].engine->end();
  EXPECT_GT(fake().counts().most_under_way, 20u) << "and it was used";
}

TEST_F(Verbs, AFailedRequestNamesNicAddressRankStatusAndWhatToLookAt) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  fake().control().fail_next(0, abi::kRetryExceeded, 129);
  ASSERT_TRUE(ranks[0].link(1).signal(0, 1, 1).ok()) << "what went wrong is told by check_peer()";
  const std::string why = lost(ranks[0], 1);
  for (const char* part : {"rank 1", "mlx5_0:1", "10.0.0.1", "transport retry counter exceeded", "status 12",
                           "vendor 129", "MOECCL_IB_GID_INDEX"}) {
    EXPECT_TRUE(has(why, part)) << part << " in " << why;
  }
  std::byte data[64] = {};
  EXPECT_TRUE(put(ranks[0], 1, 0, data, sizeof(data)).ok()) << "a put to a rank that is gone is lost";
}

TEST_F(Verbs, ARegionThatWasInvalidatedIsAnError) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  fake().control().invalidate_keys();
  std::vector<std::byte> data(100'000);
  ASSERT_TRUE(put(ranks[0], 1, 0, data.data(), data.size()).ok());
  ASSERT_TRUE(ranks[0].link(1).signal(0, 1, 1).ok());
  const std::string why = lost(ranks[0], 1);
  EXPECT_TRUE(has(why, "status 10") && has(why, "vendor 136") && has(why, "a region was taken back")) << why;
  EXPECT_EQ(ranks[1].own->signal(0, 0).word.load(), 0u) << "its signal must not come";
}

// A process was killed: its queue pairs are gone, and this rank only waits.
TEST_F(Verbs, ADeadPeerIsNoticedByOneThatOnlyWaits) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 3);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  ranks[1].engine = nullptr;
  ranks[0].engine->begin();
  const std::string why = lost(ranks[0], 1);
  EXPECT_TRUE(has(why, "lost rank 1") && has(why, "status 12")) << why;
  EXPECT_TRUE(ranks[0].link(2).check_peer().ok());
  ranks[0].engine->end();
}

// The kernel keeps a dead rank's queue pairs as long as a child has the device open, or parts of it mapped.
TEST_F(Verbs, AForkedChildHasNeitherTheDeviceNorMappingsOfIt) {
  const std::string queue = format("/tmp/uverbs-{}", getpid());
  const Fd file(::open(queue.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_TRUE(file && ftruncate(file.get(), 4096) == 0);
  void* const mapped = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, file.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  const auto look = [&] {
    int found = 0;
    for (const auto& fd : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      if (std::filesystem::read_symlink(fd.path(), gone) == "/dev/full") found |= 1;
    }
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) found |= has(line, queue.c_str()) ? 2 : 0;
    return found;
  };
  EXPECT_EQ(look(), 3);
  const pid_t child = fork();
  if (child == 0) _exit(look());
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  munmap(mapped, 4096);
  unlink(queue.c_str());
}

TEST_F(Verbs, APortThatStaysDownEndsItsLinksAndOneThatComesBackDoesNot) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  fake().control().raise("mlx5_0", abi::kEventPortError, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  fake().control().raise("mlx5_0", abi::kEventPortActive, 1);
  fake().control().raise("mlx5_0", abi::kEventPortError, 2);  // another port
  std::this_thread::sleep_for(std::chrono::milliseconds(kPortGraceMs + 300));
  EXPECT_TRUE(ranks[0].link(1).check_peer().ok());
  fake().control().raise("mlx5_0", abi::kEventPortError, 1);
  ranks[0].engine->begin();
  const std::string why = lost(ranks[0], 1);
  EXPECT_TRUE(has(why, "mlx5_0:1") && has(why, "its port went down")) << why;
  ranks[0].engine->end();
}

// Four NICs: rank 0 is near the last two, rank 1 only near the third.
TEST_F(Verbs, ARankUsesTheNicsNearItAndPairsItsNearestFirst) {
  (void)fake();
  setenv("MOECCL_TEST_MACHINE",
         (std::string(kTwoNics) + ";nic mlx5_2 3; port 4 5 2 32 2; gid 00000000000000000000ffff0a000003;gid "
                                  "00000000000000000000ffff0a000003;nic mlx5_3 4; port 4 5 2 32 2; gid "
                                  "00000000000000000000ffff0a000004;gid 00000000000000000000ffff0a000004")
             .c_str(),
         1);
  const auto network = [](const transport::NetworkOptions& given) {
    transport::NetworkOptions o = given;
    o.nearest = [rank = o.rank](std::span<const std::string> devices) -> std::vector<uint32_t> {
      EXPECT_EQ(devices.size(), 4u);
      return rank == 0 ? std::vector<uint32_t>{3, 2} : std::vector<uint32_t>{2};
    };
    return open_with(o, FakeVerbs::settings());
  };
  {
    NetworkFabrics ranks({"near", kCapabilities, fake_verbs::probe, network}, 2);
    setenv("MOECCL_TEST_MACHINE", kTwoNics, 1);
    ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
    EXPECT_EQ(fake().counts().pairs, before_.pairs + 2) << "one rail: rank 0's nearest and rank 1's";
    const std::vector<std::byte> data(100'000, std::byte{7});
    ASSERT_TRUE(put(ranks[0], 1, 0, data.data(), data.size()).ok());
    fake().control().raise("mlx5_0", abi::kEventDeviceFatal, 1);
    EXPECT_TRUE(ranks[0].link(1).check_peer().ok());
    fake().control().raise("mlx5_3", abi::kEventDeviceFatal, 1);
    EXPECT_TRUE(has(lost(ranks[0], 1), "mlx5_3:1")) << lost(ranks[0], 1);
  }
  // NICs that the user names are used unchanged.
  const auto named = [](const transport::NetworkOptions& given) {
    transport::NetworkOptions o = given;
    o.nearest = [](std::span<const std::string>) { return std::vector<uint32_t>{1}; };
    return open_with(o, FakeVerbs::settings({{"MOECCL_IB_HCA", "mlx5"}}));
  };
  NetworkFabrics ranks({"named", kCapabilities, fake_verbs::probe, named}, 2);
  ASSERT_TRUE(ranks.status.ok());
  EXPECT_EQ(fake().counts().pairs, before_.pairs + 4);
}

// A machine may have more NICs than a rank uses, and the rank's may be the last by name.
TEST_F(Verbs, TheRanksNicsAreChosenFromAll) {
  (void)fake();
  std::string many;
  for (int i = 0; i < 12; ++i) {
    const std::string n = std::to_string(10 + i);
    many += "nic mlx5_" + n + " " + n + "; port 4 5 2 32 2; gid 00000000000000000000ffff0a0000" + n +
            ";gid 00000000000000000000ffff0a0000" + n + ";";
  }
  setenv("MOECCL_TEST_MACHINE", many.c_str(), 1);
  const auto network = [](const transport::NetworkOptions& given) {
    transport::NetworkOptions o = given;
    o.nearest = [](std::span<const std::string> devices) {
      EXPECT_EQ(devices.size(), 12u);
      return std::vector<uint32_t>{11};
    };
    return open_with(o, FakeVerbs::settings());
  };
  NetworkFabrics ranks({"last", kCapabilities, fake_verbs::probe, network}, 2);
  const auto all = [](const transport::NetworkOptions& o) { return open_with(o, FakeVerbs::settings()); };
  NetworkFabrics wide({"all", kCapabilities, fake_verbs::probe, all}, 2);
  setenv("MOECCL_TEST_MACHINE", kTwoNics, 1);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  fake().control().raise("mlx5_21", abi::kEventDeviceFatal, 1);
  EXPECT_TRUE(has(lost(ranks[0], 1), "mlx5_21:1")) << lost(ranks[0], 1);
  ASSERT_TRUE(wide.status.ok()) << wide.status.message();
  EXPECT_EQ(fake().counts().pairs, before_.pairs + 2 + 2 * static_cast<int>(kMaxRails));
}

TEST_F(Verbs, AFatalErrorOfTheDeviceEndsItsLinksAtOnce) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  fake().control().raise("mlx5_0", abi::kEventDeviceFatal, 0);
  EXPECT_TRUE(has(lost(ranks[0], 1), "fatal error"));
}

TEST_F(Verbs, RefusedMemoryNamesTheLimitAndLeavesNothing) {
  fake().control().refuse_regions(ENOMEM);
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_FALSE(ranks.status.ok());
  EXPECT_TRUE(has(ranks.status.message(), "ulimit -l")) << ranks.status.message();
}

TEST_F(Verbs, LittleInlineDataIsEnough) {
  fake().control().set_inline(32);
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  ranks[0].publish_state(transport::RankState::kFailed, moecclInvalidArgument, "a reason of some length, in words");
  ASSERT_TRUE(until(ranks[1], [&] { return ranks[1].link(0).board().health.state.load() != 0; }));
}

TEST_F(Verbs, TruncatedOffersAreErrors) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok());
  Offer o;
  o.rails.push_back({});
  o.rails[0].info.device = "mlx5_0";
  o.n_queues = 2;
  const QueueAddress queues[] = {{1, 2}, {3, 4}};
  auto bytes = write_offer(o);
  const size_t without_row = bytes.size();
  const auto row = write_row(queues);
  bytes.insert(bytes.end(), row.begin(), row.end());
  const auto read = read_offer(bytes, 0);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->queue(0, 1).number, 3u);
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_EQ(read_offer(std::span(bytes).first(n), 0).ok(), n == without_row) << n << " bytes";
  }
  auto longer = bytes;
  longer.push_back({});
  EXPECT_FALSE(read_offer(longer, 0).ok());
}

TEST_F(Verbs, AnOfferWithoutItsRowIsAnError) {
  const NetworkFabrics ranks(fake_verbs::kNetworks[0], 3, 4 << 20, {},
                             [](uint32_t reader, NetworkFabrics::Offers& offers) {
                               if (reader != 0) return;
                               const auto offer = read_offer(offers[1], 1);
                               ASSERT_TRUE(offer.ok());
                               offers[1] = write_offer(*offer);
                             });
  EXPECT_EQ(ranks.status.code(), moecclRemoteError);
  EXPECT_TRUE(has(ranks.status.message(), "rank 1 sent no queue pairs")) << ranks.status.message();
}

TEST_F(Verbs, ThreeRanksMeet) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 3);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  for (uint32_t r = 0; r < 3; ++r)
    for (uint32_t p = 0; p < 3; ++p) EXPECT_EQ(ranks[r].links[p] != nullptr, p != r);
}

// The heap's pages that a NIC holds no longer belong to the program once its generation has changed.
TEST_F(Verbs, HeapMemoryIsRegisteredOnceAndAgainAfterPagesWentAway) {
  auto api = driver::IbvApi::load(FakeVerbs::library());
  ASSERT_TRUE(api.ok());
  const auto list = DeviceList::get(*api);
  auto found = list.value().look(FakeVerbs::settings());
  ASSERT_TRUE(found.ok());
  std::vector<std::unique_ptr<Rail>> rails;
  for (const FoundRail& f : *found) rails.push_back(std::move(*Rail::open(*api, f)));
  ASSERT_EQ(rails.size(), 2u);
  {
    std::vector<std::byte> memory(3 * Regions::kGranule + 1000);
    std::atomic<uint64_t> generation{0};
    Regions regions(rails);
    regions.add_heap({memory.data(), memory.size(), &generation});
    const auto first = regions.use(memory.data() + 100, 5000);
    ASSERT_NE(first.region, nullptr);
    EXPECT_EQ(first.bytes, 5000u);
    EXPECT_EQ(regions.use(memory.data() + Regions::kGranule - 10, 5000).bytes, 10u) << "up to the end of a granule";
    EXPECT_EQ(regions.registered(), 1u);
    const auto last = regions.use(memory.data() + memory.size() - 5, 5);
    EXPECT_EQ(last.region->bytes(), 1000u);
    regions.release(last.region);
    EXPECT_EQ(regions.use(memory.data() + memory.size(), 1).region, nullptr);
    generation.fetch_add(1);
    const auto again = regions.use(memory.data() + 100, 5000);
    ASSERT_NE(again.region, nullptr);
    EXPECT_NE(again.region, first.region) << "the old pages must not be read";
    EXPECT_EQ(regions.registered(), 2u) << "the old region while requests use it; the unused one is gone";
    regions.release(first.region);
    regions.release(first.region);
    EXPECT_EQ(regions.registered(), 1u);
    regions.release(again.region);

    std::vector<std::byte> lent(20'000);
    EXPECT_EQ(regions.use(lent.data(), 10).region, nullptr) << "nobody says when it ends";
    regions.lend(lent.data(), lent.size());
    const auto use = regions.use(lent.data() + 50, 19'000);
    ASSERT_NE(use.region, nullptr);
    regions.take_back(lent.data(), lent.size());
    EXPECT_EQ(regions.use(lent.data() + 50, 10).region, nullptr);
    regions.release(use.region);
    EXPECT_EQ(regions.registered(), 1u);
  }
}

TEST_F(Verbs, LentMemoryIsReadWhereItLiesUntilItIsTakenBack) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  std::vector<std::byte> data(1 << 20);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7 + i / 256);
  const int regions = fake().counts().regions;
  ASSERT_TRUE(put(ranks[0], 1, 0, data.data(), data.size()).ok());
  EXPECT_EQ(fake().counts().regions, regions) << "copied";
  ranks[0].engine->lend(data.data(), data.size());
  const uint64_t requests = fake().counts().requests;
  ASSERT_TRUE(put(ranks[0], 1, 1 << 20, data.data(), data.size()).ok());
  EXPECT_EQ(fake().counts().regions, regions + 1);
  EXPECT_EQ(fake().counts().requests, requests + 1) << "one request, no pieces of a ring";
  for (const size_t at : {size_t{0}, data.size()})
    EXPECT_EQ(std::memcmp(ranks[1].own->staging() + at, data.data(), data.size()), 0);
  ranks[0].engine->take_back(data.data(), data.size());
  EXPECT_EQ(fake().counts().regions, regions);
}

// The owner of a failed operation's memory may write to it at once. The peer must not take that for the operation's
// data.
TEST_F(Verbs, WithdrawnSourcesDoNotReachThePeer) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  std::vector<std::byte> data(1 << 20, std::byte{1});
  ranks[0].engine->lend(data.data(), data.size());
  transport::PostedPuts* const posts = ranks[0].link(1).posted_puts();
  EXPECT_FALSE(posts->reads_sources());
  posts->withdraw();
  EXPECT_TRUE(ranks[0].link(1).check_peer().ok()) << "nothing was under way";
  fake().control().set_delay_us(200'000);
  const auto state = posts->post(0, data.data(), data.size());
  ASSERT_TRUE(state.ok() && *state == PutState::kDone);
  ASSERT_TRUE(ranks[0].link(1).signal(0, 1, 9).ok());
  EXPECT_TRUE(posts->reads_sources());
  posts->withdraw();
  EXPECT_TRUE(posts->taken(posts->posted()));
  std::fill(data.begin(), data.end(), std::byte{2});
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  ranks[1].engine->progress();
  EXPECT_EQ(ranks[1].own->signal(0, 0).word.load(), 0u) << "the peer was told of data that its owner took back";
  EXPECT_NE(ranks[1].own->staging()[0], std::byte{2});
  EXPECT_TRUE(has(lost(ranks[0], 1), "failed here while its data was under way"));
  ranks[0].engine->take_back(data.data(), data.size());
}

TEST_F(Verbs, TheProbeSaysWhatItFindsAndWhyNot) {
  const auto found = probe_with(FakeVerbs::settings());
  EXPECT_TRUE(found.usable);
  EXPECT_TRUE(has(found.found, "mlx5_0:1 RoCE v2 10.0.0.1, 100 Gbit/s")) << found.found;
  EXPECT_TRUE(has(found.found, "mlx5_1:1")) << found.found;
  EXPECT_TRUE(has(found.found, "dma-buf")) << found.found;
  fake().control().set_device_memory(false, true);
  EXPECT_FALSE(has(probe_with(FakeVerbs::settings()).found, "dma-buf"));
  const auto none = probe_with(FakeVerbs::settings({{"NCCL_IB_HCA", "=mlx5_7"}}));
  EXPECT_FALSE(none.usable);
  EXPECT_TRUE(has(none.why_not, "(else NCCL_IB_HCA): \"=mlx5_7\"") && has(none.why_not, "mlx5_0, mlx5_1"))
      << none.why_not;
  Env missing;
  missing.ib_library = "/nonexistent/libibverbs.so";
  EXPECT_FALSE(probe_with(missing).usable);
  setenv("MOECCL_TEST_MACHINE", "nic mlx5_0 1; port 1 5 2 32 2", 1);
  const auto down = probe_with(FakeVerbs::settings());
  setenv("MOECCL_TEST_MACHINE", kTwoNics, 1);
  EXPECT_FALSE(down.usable);
  EXPECT_TRUE(has(down.why_not, "mlx5_0:1: its port is not active")) << down.why_not;
}

}  // namespace
}  // namespace moeccl::tests
