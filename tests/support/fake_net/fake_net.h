// SPDX-License-Identifier: Apache-2.0
// A net plugin for tests. It sends over TCP between the processes of one machine or its namespaces, keeps the rules of
// NCCL's plugins strictly (requests are tested in order, at most 8 or 32 at a time, only registered memory, a receive
// at least as large as its message), and misbehaves on command.
//
// The library exports fake_net_script() and fake_net_count() beside its plugin structures. A script consists of words:
//   devices=N          number of devices (1); 0: none
//   interfaces         one device for each network interface
//   null=N             one of N calls of isend and irecv works, the others return no request (1)
//   late=US            a request is reported as done this many microseconds after it was (0)
//   refuse             connect fails;   never: connect never returns a comm
//   accept=block       accept waits for its peer instead of returning no comm, as some plugins do
//   fail=N             the N-th send of a process breaks in the middle of its message
//   deaf               a connection that breaks is never reported: its requests are not done, and not refused
//   quiet              only the sender notices that; its peer does when the comm is closed
//   apart              a comm that is closed with requests under way harms no other; otherwise no transfer of the
//                      process works from then on, until the next script, unless the comm's peer is gone
//   locked=N           the N-th regMr of a process fails, and is not counted
//   hold               init does not return before the next script
//   untold             test does not report how many bytes came
//   cuda               its devices take CUDA memory, too
//   gpu                its devices want to be driven by a GPU
//   init               init fails
// The environment's FAKE_NET is the first script.
#pragma once

extern "C" {
void fake_net_script(const char* text);
// Returns how often a call was made: "init", "finalize", "listen", "connect", "accept", "regMr", "deregMr", "isend",
// "irecv", "iflush", "closeSend", "closeRecv", "closeListen"; "requests": the most at once on a comm; "flushed": bytes;
// "aborted": comms that were closed with requests under way; "retried": calls on a comm that had reported its end;
// "overlapped": calls of init and finalize during another one.
long fake_net_count(const char* call);
}
