// SPDX-License-Identifier: Apache-2.0
#include "topology/assign.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tests/unit/topology/fixture.h"

namespace moeccl::topology {
namespace {

AssignProblem problem(const std::vector<std::vector<int>>& distances, const std::vector<double>& rates) {
  AssignProblem p;
  p.nic_bytes_per_ns = rates;
  for (const auto& row : distances) {
    p.paths.emplace_back();
    for (const int d : row) p.paths.back().push_back({static_cast<Distance>(d), 0});
  }
  return p;
}

std::vector<uint32_t> firsts(const AssignProblem& p) {
  std::vector<uint32_t> nics;
  for (const AssignChoice& c : assign(p)) nics.push_back(c.nics.at(0));
  return nics;
}

// Returns the smallest share that a choice of one NIC per user gives, for known rates.
double smallest_share(const AssignProblem& p, const std::vector<uint32_t>& nic_of_user) {
  double least = INFINITY;
  for (size_t i = 0; i < nic_of_user.size(); ++i) {
    const uint32_t j = nic_of_user[i];
    least = std::min(least, p.nic_bytes_per_ns[j] / static_cast<double>(std::ranges::count(nic_of_user, j)));
    if (p.paths[i][j].bytes_per_ns > 0) least = std::min(least, p.paths[i][j].bytes_per_ns);
  }
  return least;
}

TEST(Assign, EachTakesItsOwnSwitch) {
  EXPECT_EQ(firsts(problem({{0, 4}, {4, 0}}, {50, 50})), (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(firsts(problem({{4, 0}, {0, 4}}, {50, 50})), (std::vector<uint32_t>{1, 0}));
}

// First come, first served would give GPU 0 the near NIC 0 and leave a far one for GPU 1, for which all NICs but 0 are
// far.
TEST(Assign, WholeNodeBeatsFirstCome) {
  const AssignProblem p = problem({{0, 1}, {0, 4}}, {25, 25});
  EXPECT_EQ(firsts(p), (std::vector<uint32_t>{1, 0}));
}

TEST(Assign, CrowdedNicsAreSharedFairly) {
  // All GPUs are near NIC 0, and the second NIC is on the other socket. Splitting 2 + 2 doubles the smallest share.
  const AssignProblem p = problem({{1, 4}, {1, 4}, {1, 4}, {1, 4}}, {50, 50});
  const std::vector<uint32_t> nics = firsts(p);
  EXPECT_EQ(std::count(nics.begin(), nics.end(), 0u), 2);
  EXPECT_DOUBLE_EQ(smallest_share(p, nics), 25);
  // A NIC that is three times as fast serves three of four GPUs.
  const std::vector<uint32_t> uneven = firsts(problem({{1, 1}, {1, 1}, {1, 1}, {1, 1}}, {75, 25}));
  EXPECT_EQ(std::count(uneven.begin(), uneven.end(), 0u), 3);
}

TEST(Assign, SlowPathsAreNoShare) {
  AssignProblem p = problem({{4, 1}, {4, 1}}, {50, 10});
  p.paths[0][0].bytes_per_ns = p.paths[1][0].bytes_per_ns = 2;  // the fast NIC is behind a narrow path
  EXPECT_EQ(firsts(p), (std::vector<uint32_t>{1, 1}));
}

// The quotient of the rates is beyond any whole number.
TEST(Assign, APathThatIsNearlyClosedIsAPath) {
  AssignProblem p = problem({{1}, {1}}, {400});
  p.paths[0][0].bytes_per_ns = 1e-30;
  EXPECT_EQ(firsts(p), (std::vector<uint32_t>{0, 0}));
}

TEST(Assign, SpareNicsServeThoseNearThem) {
  const auto choices = assign(problem({{0, 0, 4, 4}, {4, 4, 0, 0}}, {50, 50, 50, 50}));
  EXPECT_EQ(choices[0].nics, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(choices[1].nics, (std::vector<uint32_t>{2, 3}));
  // A far spare NIC stays unused.
  const auto far = assign(problem({{0, 4}}, {50, 50}));
  EXPECT_EQ(far[0].nics, (std::vector<uint32_t>{0}));
}

TEST(Assign, NothingToAssign) {
  EXPECT_TRUE(assign(problem({}, {50})).empty());
  EXPECT_TRUE(assign(problem({{}, {}}, {}))[1].nics.empty());
  EXPECT_DOUBLE_EQ(assign(problem({{0}}, {0}))[0].share_bytes_per_ns, 0);  // no rate known: no claim
}

// Compares with trying every choice: the smallest share is the largest possible, and then the distances are minimal.
TEST(Assign, IsOptimalAmongAllChoices) {
  std::mt19937 random(11);
  for (int round = 0; round < 400; ++round) {
    const size_t n = 1 + random() % 5, m = 1 + random() % 4;
    AssignProblem p;
    for (size_t j = 0; j < m; ++j) p.nic_bytes_per_ns.push_back(static_cast<double>(5 + random() % 4 * 15));
    for (size_t i = 0; i < n; ++i) {
      p.paths.emplace_back();
      for (size_t j = 0; j < m; ++j)
        p.paths[i].push_back(
            {static_cast<Distance>(random() % 5), random() % 3 == 0 ? static_cast<double>(4 + random() % 30) : 0.0});
    }
    const auto distance = [&](const std::vector<uint32_t>& nics) {
      int sum = 0;
      for (size_t i = 0; i < n; ++i) sum += static_cast<int>(p.paths[i][nics[i]].distance);
      return sum;
    };
    double best_share = 0;
    int best_distance = 0;
    std::vector<uint32_t> nics(n, 0);
    for (bool more = true; more;) {
      const double share = smallest_share(p, nics);
      const int sum = distance(nics);
      if (share > best_share * (1 + 1e-9)) best_share = share, best_distance = sum;
      if (share > best_share * (1 - 1e-9)) best_distance = std::min(best_distance, sum);
      more = false;
      for (size_t i = 0; i < n && !more; ++i) {
        more = ++nics[i] < m;
        if (!more) nics[i] = 0;
      }
    }
    const std::vector<uint32_t> chosen = firsts(p);
    EXPECT_NEAR(smallest_share(p, chosen), best_share, 1e-9 * best_share) << round;
    EXPECT_EQ(distance(chosen), best_distance) << round;
  }
}

TEST(Assign, SharedNicsOfAFixture) {
  const Graph graph = fixture("shared_nics");
  const NicAssignment a = assign_nics(graph);
  ASSERT_EQ(a.users.size(), 8u);
  ASSERT_EQ(a.nics.size(), 2u);
  const auto near = std::count_if(a.choices.begin(), a.choices.end(),
                                  [](const AssignChoice& choice) { return choice.nics.at(0) == 0; });
  EXPECT_EQ(near, 4);
}

TEST(Assign, DownPortsAreNotUsed) {
  const Graph graph = fixture("dgx");
  const NicAssignment a = assign_nics(graph);
  for (const Node* nic : a.nics) EXPECT_NE(nic->id, "pci:0000:99:00.0");
  for (size_t i = 0; i < 8; ++i)
    EXPECT_EQ(crossing(graph, *a.users[i], *a.nics[a.choices[i].nics[0]]).distance, Distance::kSwitch) << i;
}

std::vector<std::string> own(const Graph& graph, const std::vector<std::string>& devices, uint32_t rank, uint32_t n) {
  std::vector<std::string> names;
  for (const uint32_t d : devices_of_rank(graph, devices, rank, n)) names.push_back(devices[d]);
  return names;
}

TEST(DevicesOfRank, AreThoseNearItsSeatAndSpreadOverEqualOnes) {
  using Names = std::vector<std::string>;
  const Graph dgx = fixture("dgx"), shared = fixture("shared_nics"), sub_numa = fixture("sub_numa");
  Names rails;
  for (int i = 7; i >= 0; --i) rails.push_back("mlx5_" + std::to_string(i));  // in whatever order they are found
  for (uint32_t r = 0; r < 8; ++r) EXPECT_EQ(own(dgx, rails, r, 8), Names{"mlx5_" + std::to_string(r)});
  EXPECT_EQ(own(dgx, rails, 0, 1), Names{"mlx5_0"}) << "the others are behind other switches";
  for (uint32_t r = 0; r < 8; ++r)
    EXPECT_EQ(own(shared, {"mlx5_0", "mlx5_1"}, r, 8), Names{r < 4 ? "mlx5_0" : "mlx5_1"}) << r;
  EXPECT_EQ(own(shared, {"mlx5_0", "mlx5_1"}, 0, 1), (Names{"mlx5_0", "mlx5_1"})) << "both are equally near";
  EXPECT_EQ(own(shared, {"mlx5_1"}, 2, 8), Names{"mlx5_1"}) << "all that the user allows";
}

void add_to_host(Graph& graph, NodeKind kind, const std::string& id) {
  Node& node = graph.nodes.emplace_back();
  node.kind = kind;
  node.id = id;
  node.parent = "host";
}

// mlx5_1 is a virtual function of mlx5_0.
TEST(DevicesOfRank, HaveNoVirtualFunctionBesideItsDevice) {
  using Names = std::vector<std::string>;
  Graph graph = fixture("shared_nics");
  const auto nics = graph.of_kind(NodeKind::kNic);
  ASSERT_EQ(nics.size(), 2u);
  const std::string pf = nics[0]->id, vf = nics[1]->id;
  graph.find(vf)->physical = pf;
  for (uint32_t r = 0; r < 8; ++r) EXPECT_EQ(own(graph, {"mlx5_1", "mlx5_0"}, r, 8), Names{"mlx5_0"}) << r;
  EXPECT_EQ(own(graph, {"mlx5_1"}, 0, 8), Names{"mlx5_1"}) << "its device is not here";
  ASSERT_EQ(assign_nics(graph).nics.size(), 1u);
  EXPECT_EQ(assign_nics(graph).nics[0]->id, pf);
  for (Port& port : graph.find(pf)->ports) port.state = PortState::kDown;
  ASSERT_EQ(assign_nics(graph).nics.size(), 1u);
  EXPECT_EQ(assign_nics(graph).nics[0]->id, vf);
}

// Memory behind CXL is a NUMA domain without processors.
TEST(Assign, DomainsWithoutProcessorsUseNoNic) {
  Graph graph = fixture("sub_numa");
  const size_t before = assign_nics(graph).users.size();
  add_to_host(graph, NodeKind::kNuma, "numa:9");
  EXPECT_GT(before, 0u);
  EXPECT_EQ(assign_nics(graph).users.size(), before);
}

TEST(Crossing, AnUnknownPlaceIsNoDistance) {
  Graph graph = fixture("shared_nics");
  const Node gpu = *graph.of_kind(NodeKind::kGpu)[0];
  graph.find(gpu.id)->parent = "host";
  for (const Node* nic : graph.of_kind(NodeKind::kNic)) {
    EXPECT_EQ(crossing(graph, *graph.find(gpu.id), *nic).distance, Distance::kUnknown);
    EXPECT_EQ(crossing(graph, *graph.of_kind(NodeKind::kGpu)[1], *nic).distance == Distance::kUnknown, false);
  }
  EXPECT_STREQ(distance_name(Distance::kUnknown), "unknown distance");
  Graph one = fixture("this_machine");
  add_to_host(one, NodeKind::kGpu, "pci:0000:01:00.0");
  EXPECT_TRUE(place_known(one, one.nodes.back())) << "there is one socket";
}

TEST(DevicesOfRank, AreAllWhereTheGraphDoesNotKnowThem) {
  EXPECT_EQ(devices_of_rank(fixture("dgx"), std::vector<std::string>{"rxe0", "rxe1"}, 0, 2),
            (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(devices_of_rank(Graph(), std::vector<std::string>{"mlx5_0"}, 3, 2), (std::vector<uint32_t>{0}));
}

// Where tensor parallelism fills a host, each communicator of data parallelism has one of its GPUs.
TEST(DevicesOfGpu, AreThoseNearItWhicheverGpusTheCommunicatorHas) {
  const Graph dgx = fixture("dgx"), shared = fixture("shared_nics");
  std::vector<std::string> rails;
  for (int i = 7; i >= 0; --i) rails.push_back("mlx5_" + std::to_string(i));
  for (const Graph* graph : {&dgx, &shared}) {
    const std::vector<std::string> devices = graph == &dgx ? rails : std::vector<std::string>{"mlx5_0", "mlx5_1"};
    const auto gpus = graph->of_kind(NodeKind::kGpu);
    ASSERT_EQ(gpus.size(), 8u);
    for (uint32_t g = 0; g < 8; ++g) {
      const auto own = devices_of_gpu(*graph, devices, "0000" + gpus[g]->id.substr(4));  // as the driver may write it
      ASSERT_EQ(own.size(), 1u) << g;
      EXPECT_EQ(devices[own[0]], "mlx5_" + std::to_string(graph == &dgx ? g : g / 4)) << g;
    }
  }
  EXPECT_TRUE(devices_of_gpu(dgx, rails, "0000:ff:1f.0").empty());
  EXPECT_TRUE(devices_of_gpu(dgx, rails, "").empty());
  EXPECT_TRUE(
      devices_of_gpu(dgx, std::vector<std::string>{"rxe0"}, dgx.of_kind(NodeKind::kGpu)[0]->id.substr(4)).empty());
}

TEST(JoinedByNvlink, AreGpusOfOneIsland) {
  const Graph dgx = fixture("dgx");
  const auto islands = nvlink_islands(dgx);
  const auto gpus = dgx.of_kind(NodeKind::kGpu);
  ASSERT_EQ(islands.size(), 1u);
  const std::string first = gpus[0]->id.substr(4), last = "0000" + gpus[7]->id.substr(4);
  EXPECT_TRUE(joined_by_nvlink(dgx, first, last));
  EXPECT_FALSE(joined_by_nvlink(dgx, first, "0000:ff:1f.0"));
  EXPECT_FALSE(joined_by_nvlink(dgx, "", ""));
  Graph apart = dgx;
  std::erase_if(apart.links, [](const Link& l) { return l.kind == LinkKind::kNvlink; });
  EXPECT_FALSE(joined_by_nvlink(apart, first, last));
}

}  // namespace
}  // namespace moeccl::topology
