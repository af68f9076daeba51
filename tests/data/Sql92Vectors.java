import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Random;
import java.util.TreeMap;
import org.apache.rocketmq.broker.filter.MessageEvaluationContext;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.Expression;

/** Wrote sql92_vectors.jsonl beside it: which messages RocketMQ 4.9.3's own filters let through. */
public class Sql92Vectors {
    private static final Random RANDOM = new Random(11);
    private static final String[] NAMES = {"a", "b", "c", "TAGS", "_x$1"};
    private static final String[] TEXTS = {
        "x", "y", "3", "-3", "3.5", "TRUE", "true", "false", "", " 4 ", "+5", "1e1", "NaN", "0",
        "9999999999", "2147483648", "it's", "\u0663", "0x1p3", "7d", "Infinity", "null"};
    private static final String[] NUMBERS = {
        "0", "3", "-3", "5L", "3.5", ".5", "10.", "1E1", "2147483647", "2147483648", "9999999999", "+7", "- -3"};

    public static void main(String[] args) {
        String[] fixed = {
            "", "a", "NOT a", "TRUE", "NULL", "a = NULL", "a > 'x'", "TRUE = 3", "3 = TRUE", "'x' = 3", "3 = 3.0",
            "a BETWEEN 5 AND 3", "a BETWEEN 3 AND 5", "a NOT BETWEEN 3 AND 5", "3 IN ('x')", "a IN ()",
            "a IN ('x', 'y')", "a NOT IN ('x')", "a in ('x') or B is null", "(a > 3) = TRUE", "(a > 3) = 'x'",
            "TRUE = a", "a = TRUE", "a <> TRUE", "a <> 'x'", "a IS NULL IS NULL", "a = b = c", "a > b", "-a > 3",
            "-a IS NULL", "a >= 99999999999999999999", "a = 'it''s'", "a -- c\n = 'x'", "a /* = */ = 'x'",
            "a =", "= a", "(a = 'x'", "a BETWEEN 'a' AND 'b'", "a BETWEEN NULL AND 3", "a > NULL",
            "a > TRUE", "3 > 2", "NOT NOT a = 'x'", "a IS NOT NULL AND b IS NULL", "3", "'x'", "-3",
            "a > 3 OR b = 'x'", "b = 'x' OR a > 3", "a > 3 AND b = 'x'", "b = 'x' AND a > 3", "a \u00e9 b", "a != 'x'",
            "a == 'x'", "a IN (3)", "1.0e999 > a"};
        for (String sql : fixed) {
            vectors(sql, 6);
        }
        for (int i = 0; i < 350; i++) {
            vectors(condition(3), 3);
        }
    }

    private static void vectors(String sql, int count) {
        for (int i = 0; i < count; i++) {
            Map<String, String> properties = new TreeMap<>();
            for (String name : NAMES) {
                if (RANDOM.nextInt(4) > 0) {
                    properties.put(name, TEXTS[RANDOM.nextInt(TEXTS.length)]);
                }
            }
            Map<String, Object> row = new LinkedHashMap<>();
            row.put("sql", sql);
            row.put("properties", properties);
            row.put("matches", matches(sql, properties));
            System.out.println(
                JSON.toJSONString(row, SerializerFeature.BrowserCompatible, SerializerFeature.WriteMapNullValue));
        }
    }

    /** As ExpressionMessageFilter does it; null where the filter is refused. */
    private static Boolean matches(String sql, Map<String, String> properties) {
        Expression expression;
        try {
            expression = FilterFactory.INSTANCE.get("SQL92").compile(sql);
        } catch (Throwable e) {
            return null;
        }
        try {
            Object value = expression.evaluate(new MessageEvaluationContext(properties));
            return value instanceof Boolean && (Boolean) value;
        } catch (Throwable e) {
            return false;
        }
    }

    private static String condition(int depth) {
        int kind = RANDOM.nextInt(depth > 0 ? 12 : 8);
        String sign = new String[] {"=", "<>", ">", ">=", "<", "<="}[RANDOM.nextInt(6)];
        switch (kind) {
            case 0: return name() + " IS " + (RANDOM.nextBoolean() ? "NOT " : "") + "NULL";
            case 1: return name() + (RANDOM.nextBoolean() ? " NOT" : "") + " IN (" + text() + ", " + text() + ")";
            case 2: return name() + (RANDOM.nextBoolean() ? " NOT" : "") + " BETWEEN " + number() + " AND " + number();
            case 3: return name() + " " + sign + " " + number();
            case 4: return number() + sign + name();
            case 5: return name() + (RANDOM.nextBoolean() ? " = " : " <> ") + text();
            case 6: return value() + sign + value();
            case 7: return name();
            case 8: return "NOT (" + condition(depth - 1) + ")";
            case 9: return "(" + condition(depth - 1) + ")" + (RANDOM.nextBoolean() ? " = " : " <> ") + value();
            case 10: return condition(depth - 1) + " AND " + condition(depth - 1);
            default: return condition(depth - 1) + " OR " + condition(depth - 1);
        }
    }

    private static String value() {
        String[] words = {"TRUE", "FALSE", "NULL"};
        switch (RANDOM.nextInt(4)) {
            case 0: return name();
            case 1: return text();
            case 2: return number();
            default: return words[RANDOM.nextInt(3)];
        }
    }

    private static String name() {
        return NAMES[RANDOM.nextInt(NAMES.length)];
    }

    private static String text() {
        return "'" + TEXTS[RANDOM.nextInt(TEXTS.length)].replace("'", "''") + "'";
    }

    private static String number() {
        return NUMBERS[RANDOM.nextInt(NUMBERS.length)];
    }
}
