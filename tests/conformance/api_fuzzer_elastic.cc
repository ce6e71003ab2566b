// SPDX-License-Identifier: Apache-2.0
// Random calls that change the members of a communicator, move experts' state, or query and set plans and profiles.
#include <cmath>

#include "tests/conformance/api_fuzzer.h"

namespace moeccl::testing {

void Fuzzer::add_elastic() {
  add("CommInitRankConfig", [this] {
    if (below(8) != 0) return;
    moecclUniqueId id;
    std::memset(&id, number(), sizeof(id));
    const moecclConfig_t c = config();
    const bool alone = below(2) == 0;
    trim(comms_, 30, moecclCommDestroy);
    if (comms_.size() + joining_.size() < 60)
      note(moecclCommInitRankConfig(&joining_.emplace_back(nullptr), alone ? 1 : number(), id, alone ? 0 : number(),
                                    maybe(&c)));
    take_joined();
  });
  add("CommShrink", [this] {
    moecclComm_t made = nullptr;
    int excluded[4];
    for (int& rank : excluded) rank = rarely() ? 0 : number();
    trim(comms_, 30, moecclCommDestroy);
    if (comms_.size() < 60 && below(4) == 0)
      note(moecclCommShrink(comm(), maybe(excluded), rarely() ? number() % 5 : 0, maybe(&made), nullptr,
                            rarely() ? number() : static_cast<int>(below(2))),
           made, comms_);
  });
  add("CommRevoke", [this] {
    if (rarely()) note(moecclCommRevoke(comm()));
  });
  // Each id has a thread that waits a minute for its ranks.
  add("GetUniqueId", [this] {
    moecclUniqueId id;
    if (below(64) == 0) note(below(2) == 0 ? moecclGetUniqueId(maybe(&id)) : moecclCommGetUniqueId(comm(), maybe(&id)));
  });
  // With valid figures it would wait for the new ranks.
  add("CommGrow", [this] {
    moecclComm_t made = nullptr;
    moecclUniqueId id{};
    note(moecclCommGrow(below(2) == 0 ? comm() : nullptr, std::min(number(), 1), maybe(&id), number(), maybe(&made),
                        nullptr));
    EXPECT_EQ(made, nullptr);
  });
  add("ReduceGradients", [this] {
    const moecclPlacement_t p = placement();
    note(moecclReduceGradients(in(), out(), below(6) ? below(200) : huge(), type(), op(), maybe(&p), comm(), stream()));
  });
  add("ExpertLayers", [this] {
    const moecclPlacement_t p = placement();
    constexpr std::array<moecclOp_t, 3> kWhat = {moecclOpReduceGradients, moecclOpCollectGradients,
                                                 moecclOpPlaceWeights};
    moecclExpertLayer_t layers[3];
    for (size_t l = 0; l < 3; ++l) {
      float* const at = held_.data() + (rarely() ? 0 : l * kElements / 3);
      layers[l] = {maybe(&p), maybe(at), maybe(at + kElements / 6)};
    }
    note(moecclExpertLayers(rarely() ? kind() : kWhat[below(3)], maybe(layers), below(4),
                            below(6) ? below(200) : huge(), type(), op(), comm(), stream()));
  });
  add("TensorAllToAllv", [this] {
    size_t counts[64];
    for (size_t& n : counts) n = below(40) == 0 ? huge() : below(200);
    note(moecclTensorAllToAllv(in(), out(), maybe(counts), type(), comm(), stream()));
  });
  add("RoutingGetDeviceInfo", [this] {
    moecclRoutingDeviceInfo_t info{};
    info.size = sizeof(info);
    note(moecclRoutingGetDeviceInfo(pick(routings_), maybe(&info)));
  });
  add("PlanProve", [this] { note(moecclPlanProve(comm(), kind(), count(), type())); });
  add("PlanList", [this] {
    char names[60];
    size_t needed = 0;
    note(moecclPlanList(kind(), maybe(names), below(sizeof(names)), maybe(&needed)));
  });
  add("Profile", [this] {
    static const std::array<const char*, 5> kNowhere = {"", "/", "/dev/null", "/nonexistent/profile.json",
                                                        "/nonexistent/\x01"};
    const char* path = rarely() ? nullptr : kNowhere[below(kNowhere.size())];
    note(below(2) == 0 ? moecclProfileLoad(comm(), path) : moecclProfileSave(comm(), path));
    const double budget = below(3) == 0 ? std::nan("") : below(2) == 0 ? -1 : 1e300;
    if (rarely()) note(moecclCalibrate(comm(), budget, huge()));
  });
  add("TopologyDescribe", [this] {
    if (below(8) != 0) return;
    char page[200];
    size_t needed = 0;
    const char* given = text();
    if (given == nullptr || *given == '\0') given = "node:2";  // an empty one would inspect this host, which takes long
    note(moecclTopologyDescribe(given, static_cast<moecclTopologyFormat_t>(rarely() ? number() : below(4)), maybe(page),
                                below(sizeof(page)), maybe(&needed)));
  });
  add("Status", [this] {
    if (below(8) != 0) return;
    std::vector<char> page(below(5000));
    size_t needed = 0;
    note(moecclStatus(rarely() ? number() | 1 << 30 : 0, maybe(page.data()), page.size(), maybe(&needed)));
  });
  add("versions", [this] {
    int version = 0;
    note(moecclGetVersion(maybe(&version)));
    EXPECT_NE(moecclTypeName(type()), nullptr);
    EXPECT_NE(moecclOpName(kind()), nullptr);
  });
}

}  // namespace moeccl::testing
