// SPDX-License-Identifier: Apache-2.0
// Files that are cut, damaged or nonsense: each is refused with the file's name and a line, and none causes a crash.
#include <gtest/gtest.h>

#include <random>
#include <regex>

#include "tests/unit/topology/fixture.h"
#include "topology/hwloc_xml.h"
#include "topology/json.h"
#include "topology/merge.h"
#include "topology/tree.h"

namespace moeccl::topology {
namespace {

Status read_xml_text(const std::string& text) {
  const auto part = read_hwloc_xml(text, "machine.xml");
  return part.ok() ? Status() : part.status();
}
Status read_json_text(const std::string& text) {
  const auto hosts = read_json(text, "machine.json");
  return hosts.ok() ? Status() : hosts.status();
}

// Expects "machine.xml:12: ...", possibly with a column.
void expect_place(const Status& status, const std::string& text) {
  static const std::regex kPlace("^machine\\.(xml|json):[0-9]+(:[0-9]+)?: .+");
  EXPECT_FALSE(status.ok()) << "accepted: " << text.substr(0, 200);
  EXPECT_EQ(status.code(), moecclInvalidArgument);
  const std::string first_line = status.message().substr(0, status.message().find('\n'));
  EXPECT_TRUE(std::regex_search(first_line, kPlace)) << status.message();
  EXPECT_LT(status.message().size(), 600u);
}

std::string good_json() {
  const Graph graph = fixture("two_islands");
  return to_json({&graph, 1});
}

TEST(Broken, ErrorsSayWhere) {
  EXPECT_EQ(
      read_xml_text("<topology version=\"2.0\">\n <object type=\"Machine\" cpuset=\"0x1\">\n</topology>").message(),
      "machine.xml:3:1: found \"</topology>\", wanted </object>, opened in line 2");
  EXPECT_EQ(
      read_xml_text("<topology version=\"2.0\">\n <object type=\"Machine\" cpuset=\"zz\"/>\n</topology>").message(),
      "machine.xml:2: cpuset is \"zz\", wanted words such as 0x000000ff separated by commas");
  EXPECT_EQ(
      read_json_text("{\"moeccl_topology\": 1,\n \"hosts\": [\n  {\"nodes\": [\n   {\"id\": \"host\", \"kind\": "
                     "\"hoast\"}]}]}")
          .message(),
      "machine.json:4: hosts[0].nodes[0] (\"host\"): kind is \"\"hoast\"\", wanted one of host, socket, numa, cache, "
      "root, switch, nvswitch, gpu, nic");
  EXPECT_EQ(read_json_text("{\"moeccl_topology\": 1,\n \"hosts\": [],\n \"hosts\": []}").message(),
            "machine.json:3: the field \"hosts\" stands twice in one object");
  EXPECT_NE(
      read_json_text("{\"moeccl_topology\": 1,\n \"hosts\": [,]}").message().find("machine.json:2:12: syntax error"),
      std::string::npos);
}

TEST(Broken, XmlOfEveryKind) {
  const std::string head = "<topology version=\"2.0\">";
  const std::string machine = "<object type=\"Machine\" cpuset=\"0x3\" gp_index=\"1\">";
  const auto inside = [&](const std::string& text) { return head + "\n" + machine + text + "</object></topology>"; };
  const std::string pci = "<object type=\"PCIDev\" pci_busid=\"0000:01:00.0\" pci_type=\"0302 [10de:2330] [0:0] a1\" ";
  const auto nvlink = [&](const std::string& text) {
    return head + machine + pci + "gp_index=\"7\"/></object><distances2 name=\"NVLinkBandwidth\" " + text +
           "</distances2></topology>";
  };
  ASSERT_TRUE(read_xml_text(inside("")).ok()) << read_xml_text(inside("")).message();
  ASSERT_TRUE(read_xml_text(inside("<object type=\"Package\" cpuset=\"0x1\"/>")).ok());
  ASSERT_TRUE(read_xml_text(nvlink("nbobjs=\"1\"><indexes>7</indexes><u64values>0</u64values>")).ok());
  const std::string broken[] = {
      "",
      " \n ",
      "topology",
      "<",
      "<>",
      "<!-- no end",
      "<?xml",
      "<!DOCTYPE topology [<!ENTITY a \"b\">]><topology/>",
      "<topology/>",
      "<topology version=\"1.0\"/>",
      "<topology version=\"2.0\"/>",
      "<topology version=\"2.0\" version=\"2.0\"/>",
      "<topology version=2.0/>",
      "<topology version/>",
      "<topology version=\"2.0\"",
      "<topology version=\"<\"/>",
      "<topology version=\"2.0\"x=\"1\"/>",
      "<root/>",
      head,
      head + "</topologi>",
      head + "</topology",
      head + "</topology><more/>",
      head + "<object/></topology>",
      head + "<object type=\"Package\"/></topology>",
      head + "<object type=\"Machine\"/></topology>",
      head + "<object type=\"Machine\" cpuset=\"0xf...f\"/></topology>",
      head + "<object type=\"Machine\" cpuset=\"0x1\">&nbsp;</object></topology>",
      head + "<object type=\"Machine\" cpuset=\"0x1\">&#0;</object></topology>",
      head + "<object type=\"Machine\" cpuset=\"0x1\">&#xd800;</object></topology>",
      head + "<object type=\"Machine\" cpuset=\"0x1\">&#9999999;</object></topology>",
      head + "<object type=\"Machine\" cpuset=\"0x1\">&#x;</object></topology>",
      head + "<object type=\"Machine\" cpuset=\"0x1\">\x01</object></topology>",
      inside(machine + "</object>"),
      inside("<object type=\"Package\" os_index=\"-1\" cpuset=\"0x1\"/>"),
      inside("<object type=\"Package\" os_index=\"0\"/>"),
      inside("<object type=\"Package\" os_index=\"99999999999999999999\" cpuset=\"0x1\"/>"),
      inside("<object type=\"NUMANode\" os_index=\"0\" cpuset=\"0x1\" local_memory=\"many\"/>"),
      inside("<object type=\"NUMANode\" os_index=\"0\" cpuset=\"0x1\" local_memory=\"9999999999999999999\"/>"),
      inside("<object type=\"L3Cache\" cpuset=\"0x1\" cache_size=\"\"/>"),
      inside("<object type=\"Core\"/>"),
      inside("<object type=\"Bridge\"/>"),
      inside("<object type=\"Bridge\" bridge_type=\"0-1\"/>"),
      inside("<object type=\"Bridge\" bridge_type=\"0-1\" bridge_pci=\"0000:\"/>"),
      inside("<object type=\"Bridge\" bridge_type=\"0-1\" bridge_pci=\"0000:[\"/>"),
      inside("<object type=\"Bridge\" bridge_type=\"0-1\" bridge_pci=\"zz:[00-01]\"/>"),
      inside("<object type=\"Bridge\" bridge_type=\"1-1\" pci_busid=\"0000:00:40.0\"/>"),
      inside("<object type=\"Bridge\" bridge_type=\"1-1\" pci_busid=\"0000:00:00.9\"/>"),
      inside("<object type=\"Bridge\" bridge_type=\"1-1\" pci_busid=\"00:00:00:00.0\"/>"),
      inside("<object type=\"PCIDev\" pci_busid=\"0000:00:01.0\"/>"),
      inside("<object type=\"PCIDev\" pci_busid=\"0000:00:01.0\" pci_type=\"0302\"/>"),
      inside("<object type=\"PCIDev\" pci_busid=\"0000:00:01.0\" pci_type=\"03zz [10de:1111]\"/>"),
      inside("<object type=\"PCIDev\" pci_busid=\"0000:1:1\" pci_type=\"0302 [10de:1111]\"/>"),
      inside(pci + "pci_link_speed=\"fast\"/>"),
      inside(pci + "pci_link_speed=\"-1\"/>"),
      inside(pci + "pci_link_speed=\"nan\"/>"),
      inside(pci + "gp_index=\"x\"/>"),
      inside(pci + "><object type=\"OSDev\"/></object>"),
      nvlink(">"),
      nvlink("nbobjs=\"x\">"),
      nvlink("nbobjs=\"100000\">"),
      nvlink("nbobjs=\"2\"><indexes>7</indexes><u64values>0</u64values>"),
      nvlink("nbobjs=\"1\"><indexes>7 8</indexes><u64values>0</u64values>"),
      nvlink("nbobjs=\"1\"><indexes>a:b</indexes><u64values>0</u64values>"),
      nvlink("nbobjs=\"1\"><indexes>7</indexes><u64values>0 0</u64values>"),
      nvlink("nbobjs=\"1\"><indexes>7</indexes><u64values>-4</u64values>"),
  };
  for (const std::string& text : broken) expect_place(read_xml_text(text), text);
  std::string deep = head + machine;
  for (int i = 0; i < 300; ++i) deep += "<object type=\"Group\">";
  expect_place(read_xml_text(deep), "a file of depth 300");
}

TEST(Broken, JsonOfEveryKind) {
  const auto file = [](const std::string& hosts) { return "{\"moeccl_topology\": 1, \"hosts\": [" + hosts + "]}"; };
  const std::string host = "{\"id\": \"host\", \"kind\": \"host\"}";
  const auto node = [&](const std::string& fields) {
    return file("{\"nodes\": [" + host + ", {\"id\": \"n\", \"kind\": \"gpu\", \"parent\": \"host\"" + fields + "}]}");
  };
  const auto port = [&](const std::string& fields) { return node(", \"ports\": [{" + fields + "}]"); };
  const auto link = [&](const std::string& fields) {
    return file("{\"nodes\": [" + host + ", {\"id\": \"n\", \"kind\": \"gpu\", \"parent\": \"host\"}], \"links\": [{" +
                fields + "}]}");
  };
  ASSERT_TRUE(read_json_text(node("")).ok()) << read_json_text(node("")).message();
  ASSERT_TRUE(read_json_text(port("\"number\": 1, \"rate\": 10")).ok());
  ASSERT_TRUE(read_json_text(link("\"kind\": \"nvlink\", \"a\": \"host\", \"b\": \"n\", \"bandwidth\": 4")).ok());
  const std::string broken[] = {
      "",
      "{",
      "[]",
      "1",
      "null",
      "\"text\"",
      "{}",
      "{\"moeccl_topology\": 2}",
      "{\"moeccl_topology\": \"1\"}",
      "{\"moeccl_topology\": 1}",
      "{\"moeccl_topology\": 1, \"hosts\": 4}",
      "{\"moeccl_topology\": 1, \"hosts\": []}",
      "{\"moeccl_topology\": 1, \"hosts\": [], \"host\": 1}",
      "{\"moeccl_topology\": 1, \"units\": 3, \"hosts\": [1]}",
      "{\"moeccl_topology\": 1, \"units\": {\"latency\": \"us\"}, \"hosts\": [1]}",
      "{\"moeccl_topology\": 1, \"units\": {\"speed\": \"c\"}, \"hosts\": [1]}",
      "{\"moeccl_topology\": 1, \"units\": {\"bandwidth\": 7}, \"hosts\": [1]}",
      "{\"moeccl_topology\": 1, \"hosts\": [1]} trailing",
      "{\"moeccl_topology\": 1e999}",
      "{\"moeccl_topology\": 1, \"hosts\": [\"\xff\"]}",
      file("1"),
      file("{}"),
      file("{\"nodes\": {}}"),
      file("{\"nodes\": []}"),
      file("{\"nodes\": [3]}"),
      file("{\"nodes\": [{}]}"),
      file("{\"nodes\": [{\"id\": 4}]}"),
      file("{\"nodes\": [{\"id\": \"\"}]}"),
      file("{\"nodes\": [{\"id\": \"host\"}]}"),
      file("{\"nodes\": [{\"id\": \"a\\u0000b\", \"kind\": \"host\"}]}"),
      file("{\"nodes\": [{\"id\": \"g\", \"kind\": \"gpu\"}]}"),
      file("{\"nodes\": [{\"id\": \"host\", \"kind\": \"host\", \"parent\": \"host\"}]}"),
      file("{\"nodes\": [" + host + ", " + host + "]}"),
      file("{\"nodes\": [" + host + ", {\"id\": \"host\", \"kind\": \"gpu\", \"parent\": \"host\"}]}"),
      file("{\"nodes\": [" + host + "], \"count\": 0}"),
      file("{\"nodes\": [" + host + "], \"count\": 1000000}"),
      file("{\"nodes\": [" + host + "], \"count\": -1}"),
      file("{\"nodes\": [" + host + "], \"count\": 4096}, {\"nodes\": [" + host + "]}"),
      file("{\"nodes\": [" + host + "], \"links\": 1}"),
      file("{\"nodes\": [" + host + "], \"notes\": [1]}"),
      file("{\"nodes\": [" + host + "], \"nods\": []}"),
      node(", \"parent\": 1"),
      node(", \"parent\": \"socket:9\""),
      node(", \"parent\": \"n\""),
      node(", \"kind\": \"GPU\""),
      node(", \"kind\": 3"),
      node(", \"name\": []"),
      node(", \"name\": \"" + std::string(300, 'x') + "\""),
      node(", \"number\": -1"),
      node(", \"number\": 1.5"),
      node(", \"number\": \"1\""),
      node(", \"cpus\": \"3-1\""),
      node(", \"cpus\": \"1,1\""),
      node(", \"cpus\": \"1,\""),
      node(", \"cpus\": \"0-99999999\""),
      node(", \"cpus\": \" 1\""),
      node(", \"cpus\": 1"),
      node(", \"cores\": 1000000000"),
      node(", \"memory\": 99999999999999999999"),
      node(", \"bandwidth\": -1"),
      node(", \"bandwidth\": \"25 GB/s\""),
      node(", \"bandwidth\": null"),
      node(", \"bandwidth\": 1e300"),
      node(", \"latency\": true"),
      node(", \"os_devices\": \"cuda0\""),
      node(", \"sources\": [[]]"),
      node(", \"colour\": \"red\""),
      port("\"number\": 256"),
      port("\"layer\": \"ethernet\""),
      port("\"state\": \"up!\""),
      port("\"rate\": \"400\""),
      port("\"mtu\": -4"),
      port("\"gid\": 3"),
      port("\"speed\": 3"),
      port("\"number\": 1}, {\"number\": 1"),
      link(""),
      link("\"kind\": \"nvlink\", \"a\": \"host\""),
      link("\"a\": \"host\", \"b\": \"n\", \"bandwidth\": 4"),
      link("\"kind\": \"nvlink\", \"a\": \"host\", \"b\": \"m\""),
      link("\"kind\": \"nvlink\", \"a\": \"n\", \"b\": \"n\""),
      link("\"a\": \"host\", \"b\": \"n\", \"kind\": \"copper\""),
      link("\"kind\": \"nvlink\", \"a\": \"host\", \"b\": \"n\", \"count\": -1"),
      link("\"kind\": \"nvlink\", \"a\": \"host\", \"b\": \"n\", \"bandwidth\": -1"),
      link("\"kind\": \"nvlink\", \"a\": \"host\", \"b\": \"n\", \"width\": 1"),
      link("\"kind\": \"nvlink\", \"a\": \"host\", \"b\": \"n\", \"kind\": \"nvlink\""),
      node(", \"number\": 1, \"name\": \"x\", \"number\": 2"),
  };
  for (const std::string& text : broken) expect_place(read_json_text(text), text);
}

TEST(Broken, MoreCoresThanRanksCanBeAreCountedNoFurther) {
  const auto hosts =
      read_json(R"({"hosts":[{"count":4096,"nodes":[{"id":"host","kind":"host","cores":65536}]}]})", "machine.json");
  if (!hosts.ok()) return;
  const auto tree = level_tree(*hosts, 0);
  ASSERT_FALSE(tree.ok());
  EXPECT_NE(tree.status().message().find("between 1 and 1048576"), std::string::npos) << tree.status().message();
}

TEST(Broken, CutFiles) {
  std::mt19937 random(5);
  const std::string xml = read_file(fixture_folder() + "/two_islands.xml"), json = good_json();
  const size_t xml_end = xml.rfind('>'), json_end = json.rfind('}');
  for (int i = 0; i < 150; ++i) {
    const std::string cut_xml = xml.substr(0, random() % xml_end), cut_json = json.substr(0, random() % json_end);
    expect_place(read_xml_text(cut_xml), cut_xml);
    expect_place(read_json_text(cut_json), cut_json);
  }
}

// Whatever happens to a file, it is refused with the place of the error, or it gives a graph that can be merged and
// written.
TEST(Broken, DamagedFilesNeverCrash) {
  std::mt19937 random(9);
  const std::string xml = read_file(fixture_folder() + "/pcie_only.xml");
  const Graph graph = fixture("pcie_only");
  const std::string json = to_json({&graph, 1});
  const std::string alphabet = "<>/\"'&;={}[]:,.-0123456789abcdefx \n\t\xff";
  int refused = 0;
  for (int i = 0; i < 600; ++i) {
    const bool is_xml = i % 2 == 0;
    std::string text = is_xml ? xml : json;
    for (auto n = 1 + random() % 3; n > 0; --n) {
      const size_t at = random() % text.size();
      if (random() % 2 == 0) {
        text[at] = alphabet[random() % alphabet.size()];
      } else {
        text.erase(at, 1 + random() % 20);
      }
    }
    std::vector<Graph> parts;
    Status status;
    if (is_xml) {
      auto part = read_hwloc_xml(text, "machine.xml");
      if (part.ok()) parts = {part.value()};
      status = part.ok() ? Status() : part.status();
    } else {
      auto hosts = read_json(text, "machine.json");
      if (hosts.ok()) parts = hosts.value();
      status = hosts.ok() ? Status() : hosts.status();
    }
    if (!status.ok()) {
      ++refused;
      expect_place(status, text);
      continue;
    }
    const auto merged = merge(parts);
    ASSERT_TRUE(merged.ok()) << merged.status().message();
    EXPECT_TRUE(validate(merged.value()).ok());
  }
  EXPECT_GT(refused, 200);
}

}  // namespace
}  // namespace moeccl::topology
