// SPDX-License-Identifier: Apache-2.0
// A net plugin of our own, for tests: sends over TCP between the processes of one machine or its namespaces, obeys the
// rules of NCCL's plugins strictly (requests tested in order, at most 8 or 32 of them, registered memory alone, a
// receive as large as what comes), and misbehaves as it is told.
//
// The library exports fake_net_script() and fake_net_count() beside its plugin structures. A script is words:
//   devices=N          how many it has (1); 0: none
//   interfaces         one for each network interface
//   null=N             of N calls of isend and irecv one does something, the others give no request (1)
//   late=US            a request is told to be done so many microseconds after it was (0)
//   refuse             connect fails;   never: connect gives no comm, ever
//   accept=block       accept waits for its peer instead of giving no comm, as some plugins do
//   fail=N             the N-th send of a process breaks in the middle of its message
//   untold             test does not tell how many bytes came
//   cuda               its devices take CUDA memory, too
//   gpu                its devices want to be driven by a GPU
//   init               init fails
// The environment's FAKE_NET is the first script.
#pragma once

extern "C" {
void fake_net_script(const char* text);
// How often a call was made: "init", "finalize", "listen", "connect", "accept", "regMr", "deregMr", "isend", "irecv",
// "iflush", "closeSend", "closeRecv", "closeListen"; "requests": the most at once on a comm; "flushed": bytes.
long fake_net_count(const char* call);
}
