// SPDX-License-Identifier: Apache-2.0
// See one_file.cc.
int run_tests_of_name(int argc, char** argv);

int main(int argc, char** argv) { return run_tests_of_name(argc, argv); }
