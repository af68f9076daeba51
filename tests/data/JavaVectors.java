import com.alibaba.fastjson.JSON;
import java.net.Inet6Address;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.TreeMap;
import org.apache.rocketmq.common.message.MessageDecoder;

/** Wrote java_vectors.jsonl beside it: what Java and RocketMQ 4.9.3's own code answer. */
public class JavaVectors {
    private static final Random RANDOM = new Random(7);

    public static void main(String[] args) throws Exception {
        for (int i = 0; i < 150; i++) {
            byte[] bytes = oddBytes();
            row("utf8", quoted(hex(bytes)), quoted(new String(bytes, StandardCharsets.UTF_8)));
        }
        String[] pieces = {"\u0001", "\u0002", "a", "b", "TAGS", "", "é", "x"};
        for (int i = 0; i < 150; i++) {
            String text = joined(pieces, RANDOM.nextInt(14));
            row("props", quoted(text), quoted(MessageDecoder.string2messageProperties(text)));
        }
        for (String text : new String[] {
            "", "0", "1", "-1", "+1", "+", "-", "00012", "2147483647", "2147483648", "-2147483648",
            "-2147483649", " 1", "1 ", "1_0", "\u0661\u0662", "\uff11\uff12", "\ud835\udfce", "\u00b2",
            "0x1", "1.0", "1e3", "--1", "+-1", "\u0be7", "\u2164", "99999999999999999999"}) {
            String value;
            try {
                value = "" + Integer.parseInt(text);
            } catch (NumberFormatException e) {
                value = "null";
            }
            row("int", quoted(text), value);
        }
        for (String text : new String[] {
            "", "a", "polygenelubricants", "TagA", "TagB", "Aa", "BB", "\ud83d\ude00", "\ud83d",
            "a\ud83d\ude00b", "标签", "ключ"}) {
            row("hash", quoted(text), "" + text.hashCode());
        }
        for (int i = 0; i < 60; i++) {
            maps(oddNames(RANDOM.nextInt(40)));
        }
        for (int bucket = 0; bucket < 4; bucket++) {
            maps(namesOfBucket(bucket, 8 + 2 * bucket));
        }
        for (String text : new String[] {
            "::1", "2001:db8::1", "::ffff:1.2.3.4", "fe80::1", "::", "1:0:0:2:0:0:0:3", "::1.2.3.4"}) {
            byte[] bytes = Inet6Address.getByName(text).getAddress();
            row("ip", quoted(text), quoted(InetAddress.getByAddress(bytes).getHostAddress()));
        }
        for (String text : new String[] {"::1", "2001:db8::1", "127.0.0.1", "255.1.2.3"}) {
            InetAddress address = InetAddress.getByName(text);
            String id = MessageDecoder.createMessageId(new InetSocketAddress(address, 10911), 0x123456789aL);
            row("id", quoted(text), quoted(id), "" + MessageDecoder.decodeMessageId(id).getOffset());
        }
        for (String text : new String[] {
            "a\"b", "a\\b", "a/b", "\u0001", "\t\n\r\b\f", "\u007f", "\u0080", "\u009f", "\u00a0", "é",
            "\u2028", "\u2029", "\ud83d\ude00", "\u0000", "\u000b", "\u001f", "'", "\ufeff", "\u200b"}) {
            Map<String, Object> one = new LinkedHashMap<>();
            one.put(text, 1);
            row("fastjson", quoted(text), quoted(JSON.toJSONString(one, true)));
        }
    }

    private static void maps(List<String> names) {
        Map<String, String> linked = new LinkedHashMap<>();
        Map<String, String> grown = new HashMap<>();
        for (String name : names) {
            linked.put(name, "");
            grown.put(name, "");
        }
        row("map", quoted(linked.keySet()), quoted(grown.keySet()), quoted(new HashMap<>(linked).keySet()));
    }

    private static List<String> oddNames(int count) {
        String[] known = {"KEYS", "TAGS", "UNIQ_KEY", "WAIT", "DELAY", "REAL_TOPIC", "REAL_QID", "CLUSTER"};
        String[] alike = {"Aa", "BB", "AaAa", "BBBB", "AaBB", "BBAa"};
        List<String> names = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            switch (RANDOM.nextInt(4)) {
                case 0 -> names.add("k" + RANDOM.nextInt(1000));
                case 1 -> names.add(alike[RANDOM.nextInt(alike.length)]);
                case 2 -> names.add(known[RANDOM.nextInt(known.length)]);
                default -> names.add("ключ-" + RANDOM.nextInt(50));
            }
        }
        return names;
    }

    private static List<String> namesOfBucket(int bucket, int count) {
        List<String> names = new ArrayList<>();
        for (int i = 0; names.size() < count; i++) {
            int hash = ("k" + i).hashCode();
            if (((hash ^ (hash >>> 16)) & 15) == bucket) {
                names.add("k" + i);
            }
        }
        return names;
    }

    private static byte[] oddBytes() {
        int[] leads = {0x41, 0xc2, 0xe0, 0xe2, 0xed, 0xed, 0xf0, 0xf4, 0x80, 0xa0, 0xbf, 0x9f};
        byte[] bytes = new byte[1 + RANDOM.nextInt(7)];
        for (int i = 0; i < bytes.length; i++) {
            bytes[i] = (byte) (RANDOM.nextInt(5) == 0 ? RANDOM.nextInt(256) : leads[RANDOM.nextInt(leads.length)]);
        }
        return bytes;
    }

    private static String joined(String[] pieces, int count) {
        StringBuilder text = new StringBuilder();
        for (int i = 0; i < count; i++) {
            text.append(pieces[RANDOM.nextInt(pieces.length)]);
        }
        return text.toString();
    }

    private static void row(String kind, String... values) {
        System.out.println("[\"" + kind + "\", " + String.join(", ", values) + "]");
    }

    private static String hex(byte[] bytes) {
        StringBuilder text = new StringBuilder();
        for (byte each : bytes) {
            text.append(String.format("%02x", each));
        }
        return text.toString();
    }

    private static String quoted(String text) {
        StringBuilder out = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') {
                out.append('\\').append(c);
            } else if (c < 32 || c > 126) {
                out.append(String.format("\\u%04x", (int) c));
            } else {
                out.append(c);
            }
        }
        return out.append('"').toString();
    }

    private static String quoted(Collection<String> texts) {
        List<String> parts = new ArrayList<>();
        for (String text : texts) {
            parts.add(quoted(text));
        }
        return "[" + String.join(", ", parts) + "]";
    }

    private static String quoted(Map<String, String> map) {
        List<String> parts = new ArrayList<>();
        for (Map.Entry<String, String> entry : new TreeMap<>(map).entrySet()) {
            parts.add(quoted(entry.getKey()) + ": " + quoted(entry.getValue()));
        }
        return "{" + String.join(", ", parts) + "}";
    }
}
