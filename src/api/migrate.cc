// SPDX-License-Identifier: Apache-2.0
// Entry points of migrate.h.
#include "moeccl/migrate.h"

#include <memory>

#include "src/api/convert.h"
#include "src/api/hybrid_handle.h"
#include "src/moe/migrate/migration.h"

using namespace moeccl;
using comm::Communicator;

namespace {

struct MigrationHandle : api::OnComm<comm::Migration> {
  static constexpr api::Words kWords{"migration", "migration", "moecclMigrationCreate", "the migration's"};
};
using MigrationTable = api::HandleTable<MigrationHandle, moecclMigration_t, 0xC8>;

}  // namespace

moecclResult_t moecclMigrationCreate(moecclMigration_t* migration, moecclHybrid_t hybrid, moecclComm_t comm_handle,
                                     const moecclMigrationConfig_t* config) {
  return api::create_from<MigrationTable>(migration, "the address of a moecclMigration_t", hybrid, comm_handle, config);
}

moecclResult_t moecclMigrationDestroy(moecclMigration_t migration) {
  return api::guarded(nullptr, [&] { return api::destroy<MigrationTable>(migration); });
}

moecclResult_t moecclMigrationGetInfo(moecclMigration_t migration, int layer, moecclMigrationInfo_t* info) {
  return api::with<MigrationTable, api::kLocal>(migration,
                                                [&](comm::Migration& m, Communicator&) { return m.info(layer, info); });
}

moecclResult_t moecclMigrationSend(moecclMigration_t migration, int layer, const void* experts, const void* shared,
                                   moecclCodecError_t* errors) {
  return api::with<MigrationTable, api::kLocal>(
      migration, [&](comm::Migration& m, Communicator&) { return m.send(layer, experts, shared, errors); });
}

moecclResult_t moecclMigrationSendFused(moecclMigration_t migration, int layer, const void* experts, const void* shared,
                                        moecclExpertUpdateFn_t update, void* context, moecclCodecError_t* errors) {
  return api::with<MigrationTable, api::kLocal>(migration, [&](comm::Migration& m, Communicator&) -> Status {
    MOECCL_TRY(comm::check_update(update, "moecclMigrationSend"));
    comm::ExpertUpdate step(update, context);
    return m.send(layer, experts, shared, errors, &step);
  });
}

moecclResult_t moecclMigrationBegin(moecclMigration_t migration, int layer) {
  return api::with<MigrationTable>(migration, [&](comm::Migration& m, Communicator&) { return m.begin(layer); });
}

moecclResult_t moecclMigrationBeginInto(moecclMigration_t migration, int layer, const void* shared, void* held) {
  return api::with<MigrationTable>(migration, [&](comm::Migration& m, Communicator&) {
    using Pin = api::CommTable::Pin;
    auto pin = std::make_shared<Pin>(api::CommTable::get().pin(MigrationTable::get().find(migration)->comm_handle));
    const comm::Migration::Into into{shared, held, std::move(pin)};
    return m.begin(layer, &into);
  });
}

moecclResult_t moecclMigrationWaitExpert(moecclMigration_t migration, int layer, int index) {
  return api::collective<MigrationTable>(
      migration, "moecclMigrationWaitExpert",
      [&](comm::Migration& m, Communicator&) { return m.wait_expert(layer, index); });
}

moecclResult_t moecclMigrationWait(moecclMigration_t migration, int layer, const void* shared, void* held,
                                   uint64_t* epoch) {
  return api::collective<MigrationTable>(migration, "moecclMigrationWait", [&](comm::Migration& m, Communicator&) {
    return m.wait(layer, shared, held, epoch);
  });
}

moecclResult_t moecclMigrationWaitEncoded(moecclMigration_t migration, int layer, const void* shared, uint64_t* epoch) {
  return api::collective<MigrationTable>(
      migration, "moecclMigrationWaitEncoded",
      [&](comm::Migration& m, Communicator&) { return m.wait_encoded(layer, shared, epoch); });
}

moecclResult_t moecclMigrationUseExpert(moecclMigration_t migration, int layer, int index,
                                        const moecclExpertUse_t* use) {
  return api::with<MigrationTable, api::kLocal>(
      migration, [&](comm::Migration& m, Communicator&) { return m.use_expert(layer, index, use); });
}

moecclResult_t moecclMigrationTest(moecclMigration_t migration, int layer, int* done) {
  return api::with<MigrationTable, api::kLocal>(migration,
                                                [&](comm::Migration& m, Communicator&) { return m.test(layer, done); });
}
